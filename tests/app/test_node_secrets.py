"""The secrets of a pool: a node without its files has those of the database."""

import asyncio
import hashlib
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, FormData

from shoal.app.fleet_files import FILE as FLEET_FILE
from shoal.app.node_secrets import AUTHORITY, NAMES, SERVER_KEY, NodeSecrets
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.config.secret_files import KEY_FILE, SEED_FILE, SIGNING_LOG_FILE, TOKEN_FILE
from shoal.domain.errors import ConfigError, StoreError
from shoal.store.postgres import database
from shoal.store.postgres.database import PostgresStore
from shoal.store.postgres.secrets import SecretsChanged
from shoal.store.signing_keys import begin_new_log, open_keys

NOW = 1_700_000_000.0


@pytest.fixture
async def url(database_url: str) -> str:
    """Return a database with tables."""
    store = PostgresStore(database_url)
    await store.open()
    await store.close()
    return database_url


def node(folder: Path, url: str, **settings: Any) -> NodeSecrets:
    return NodeSecrets(ServeConfig(data_dir=folder, store=url, **settings))


def with_files(folder: Path, **values: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("_", "-")).write_text(value)
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text().strip()
        for name in NAMES
        if (folder / name).exists()
    }


async def test_node_without_its_folder_starts_as_the_same_pool(
    tmp_path: Path, database_url: str
) -> None:
    def settings(folder: Path) -> ServeConfig:
        return ServeConfig(
            *("127.0.0.1", 0),
            data_dir=folder,
            store=database_url,
            tls="auto",
            no_discovery=True,
            drain=0.0,
        )

    folder = tmp_path / "first"
    async with run_coordinator(settings(folder)) as running:
        key, created = running.pinned_key, (folder / SEED_FILE).stat().st_mtime
        link, api_key = running.dashboard, running.api_key
        headers = {"Authorization": f"Bearer {api_key}"}
        form = FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename="in.jsonl")
        async with (
            ClientSession(running.url, headers=headers) as session,
            session.post("/v1/files", data=form, ssl=False) as response,
        ):
            uploaded = (await response.json())["id"]
            value = hashlib.sha256(b"large").hexdigest()
            path = f"/v1/blobs/{value}"
            async with session.put(path, data=b"large", ssl=False) as response:
                assert response.status < 300
    kept = contents(folder)
    await asyncio.to_thread(shutil.rmtree, folder)

    async with run_coordinator(settings(tmp_path / "second")) as running:
        assert running.pinned_key == key
        code = link.partition("#signin=")[2]
        async with (
            ClientSession(running.url) as session,
            session.post(
                "/dashboard/session",
                json={"code": code},
                headers={"x-shoal-page": "1"},
                ssl=False,
            ) as response,
        ):
            assert response.status == 200
        async with ClientSession(running.url, headers=headers) as session:
            for path, content in (
                (f"/v1/files/{uploaded}/content", b"{}\n"),
                (f"/v1/blobs/{value}", b"large"),
            ):
                async with session.get(path, ssl=False) as response:
                    assert await response.read() == content

    assert {*kept} == {*NAMES} - {FLEET_FILE}
    assert contents(tmp_path / "second") == kept
    assert (tmp_path / "second" / SEED_FILE).stat().st_mtime == created


@pytest.mark.parametrize("new_log", [False, True])
async def test_new_log_has_a_new_key_where_nothing_shows_that_the_old_one_may_go_on(
    tmp_path: Path, database_url: str, new_log: bool
) -> None:
    def settings(folder: Path, **more: Any) -> ServeConfig:
        common: dict[str, Any] = {
            "port": 0,
            "store": database_url,
            "no_discovery": True,
            "drain": 0.0,
        }
        return ServeConfig(data_dir=folder, **common | more)

    async with run_coordinator(settings(tmp_path / "a")) as running:
        key = running.hub.public_key

    async with run_coordinator(settings(tmp_path / "b", new_log=new_log)) as running:
        assert (running.hub.public_key != key) == new_log
        key = running.hub.public_key
    # It is asked for once: a service may have the option for ever.
    async with run_coordinator(settings(tmp_path / "b", new_log=new_log)) as running:
        assert running.hub.public_key == key
    async with run_coordinator(settings(tmp_path / "a")) as running:
        assert running.hub.public_key == key


async def test_start_that_fails_leaves_no_secrets_of_its_own(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LOCK_ATTEMPTS", 1)
    other = PostgresStore(database_url)
    await other.open()  # it is about to store the secrets of a new pool
    folder = with_files(tmp_path / "a", join_token="given")
    config = ServeConfig(
        port=0, data_dir=folder, store=database_url, tls="auto", no_discovery=True
    )

    with pytest.raises(StoreError, match="is in use by"):
        async with run_coordinator(config):
            pass

    assert contents(folder) == {TOKEN_FILE: "given"}
    await other.close()


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_fetched_files_are_private(tmp_path: Path, url: str) -> None:
    node(with_files(tmp_path / "a", api_key="k", fleet="f"), url).publish()

    node(tmp_path / "b", url).fetch()

    files = [tmp_path / "b" / name for name in contents(tmp_path / "b")]
    assert [each.name for each in files] == [KEY_FILE, FLEET_FILE]
    assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}


@pytest.mark.parametrize("name", [KEY_FILE, TOKEN_FILE, FLEET_FILE, SERVER_KEY])
def test_other_pool_is_refused(tmp_path: Path, url: str, name: str) -> None:
    for folder, value in (("a", "one"), ("b", "another")):
        (tmp_path / folder / "tls").mkdir(parents=True)
        (tmp_path / folder / name).write_text(value)
    first, second = node(tmp_path / "a", url), node(tmp_path / "b", url)
    first.publish()

    with pytest.raises(ConfigError, match=f"b/{name} is not the one") as caught:
        second.fetch()

    assert f"DELETE FROM secrets WHERE name = '{name}'" in str(caught.value)
    assert (tmp_path / "b" / name).read_text() == "another"
    (tmp_path / "b" / name).unlink()
    second.fetch()
    second.publish()
    first.fetch()
    assert contents(tmp_path / "b") == {name: "one"}


def test_signing_key_of_another_pool_is_refused(tmp_path: Path, url: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        open_keys(tmp_path / folder, NOW)
    node(tmp_path / "a", url).publish()

    with pytest.raises(ConfigError, match="b/signing-key is not the one"):
        node(tmp_path / "b", url).fetch()


def test_given_key_replaces_that_of_the_pool(tmp_path: Path, url: str) -> None:
    folder = with_files(tmp_path / "a", api_key="old")
    node(folder, url).publish()
    again = node(with_files(folder, api_key="older"), url, api_key="new")
    again.fetch()
    with_files(folder, api_key="new")

    again.publish()

    node(tmp_path / "b", url).fetch()
    assert contents(tmp_path / "b") == {KEY_FILE: "new"}


@pytest.mark.parametrize("name", [KEY_FILE, TOKEN_FILE, FLEET_FILE, SERVER_KEY])
def test_secret_that_one_node_has_replaced_reaches_the_others(
    tmp_path: Path, url: str, name: str
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "tls").mkdir(parents=True)
    (tmp_path / "a" / name).write_text("old")
    first, second = node(tmp_path / "a", url), node(tmp_path / "b", url)
    first.fetch()
    first.publish()
    second.fetch()
    second.publish()

    (tmp_path / "a" / name).write_text("new")  # as a mounted file is
    first = node(tmp_path / "a", url)
    first.fetch()
    first.publish()

    with pytest.raises(SecretsChanged, match="start this one again"):
        second.publish()  # it has waited meanwhile, with the old one
    node(tmp_path / "b", url).fetch()
    assert contents(tmp_path / "b") == {name: "new"}
    # Both have replaced it: nothing says which one is right.
    (tmp_path / "a" / name).write_text("newer")
    first.publish()
    (tmp_path / "b" / name).write_text("other")
    with pytest.raises(ConfigError, match=f"b/{name} is not the one"):
        node(tmp_path / "b", url).fetch()


def test_replaced_signing_key_reaches_other_nodes(tmp_path: Path, url: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    open_keys(first, NOW)
    node(first, url).publish()
    node(second, url).fetch()
    old = contents(second)
    secrets = node(first, url)
    secrets.fetch()

    new = begin_new_log(first, None, NOW)  # and the process is killed here, or not
    node(first, url).fetch()
    secrets.publish()
    node(second, url).fetch()

    assert contents(second)[SEED_FILE] != old[SEED_FILE]
    assert contents(second) == contents(first)
    assert open_keys(second, NOW).signer.public_key == new.signer.public_key
    # A checkpoint that was shown since is no change.
    (first / SIGNING_LOG_FILE).write_text((first / SIGNING_LOG_FILE).read_text() + " ")
    node(first, url).fetch()


def test_new_authority_reaches_other_nodes(tmp_path: Path, url: str) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        (folder / "tls").mkdir(parents=True)
        for name in (SERVER_KEY, *AUTHORITY, "tls/server.pem"):
            (folder / name).write_text("old")
    secrets = node(first, url)
    secrets.fetch()
    secrets.publish()
    for name in AUTHORITY:
        (first / name).write_text("new")
    secrets.publish()

    node(second, url).fetch()

    assert contents(second) == contents(first)
    assert not (second / "tls/server.pem").exists()  # the old authority signed it
    assert (first / "tls/server.pem").exists()


def test_one_of_two_that_begin_a_pool_at_once_starts_again(
    tmp_path: Path, url: str
) -> None:
    nodes = [node(tmp_path / name, url) for name in ("a", "b")]
    for each in nodes:
        each.fetch()
    for name in ("a", "b"):
        with_files(tmp_path / name, api_key=name, join_token=name)
    nodes[0].publish()

    with pytest.raises(SecretsChanged, match="start this one again"):
        nodes[1].publish()

    assert contents(tmp_path / "b") == {}
    node(tmp_path / "b", url).fetch()
    assert contents(tmp_path / "b") == {KEY_FILE: "a", TOKEN_FILE: "a"}


def test_database_without_tables_has_no_secrets(
    tmp_path: Path, database_url: str
) -> None:
    node(tmp_path / "a", database_url).fetch()

    assert contents(tmp_path / "a") == {}
