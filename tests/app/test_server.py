"""A coordinator as `shoal serve` runs it: webhooks, payments and announcements."""

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.facilitator import SOLANA, run_facilitator
from gateway.providers import COMMIT, provider
from gateway.receiver import run_receiver, verify
from gateway.serving import Pool, eventually
from shoal.app.endpoints import plain_peers
from shoal.app.server import run_coordinator
from shoal.app.settings import read_settings
from shoal.cli.main import main
from shoal.config import ServeConfig, X402Config
from shoal.config.secret_files import SIGNING_LOG_FILE, signing_key_created_at
from shoal.domain.errors import ConfigError, Fenced, StoreBroken, StoreError
from shoal.pool.inputs import AccountTopUp
from shoal.pool.models.machine import MachineKind, PlacementRules
from shoal.protocols.dispatch import Config
from shoal.protocols.tealenet import Config as TealeConfig
from shoal.store.ledger import LogHead
from shoal.store.signing_keys import SigningKeys
from shoal.store.sql.store import take_over

SECRET = "a secret of the receiver's"
OPEN = {"dispatch": Config(open=True)}
PAID = X402Config(
    facilitator="http://127.0.0.1:1", pay_to="payee", network=SOLANA, asset="token"
)
PRICED = {"price_cheap_task": "$0.001"}


def settings(folder: Path, **more: Any) -> ServeConfig:
    return ServeConfig(port=0, data_dir=folder, join_token="", drain=0.0, **more)


async def test_webhook_is_delivered_for_a_committed_job(tmp_path: Path) -> None:
    async with (
        run_receiver() as receiver,
        run_coordinator(settings(tmp_path, webhooks="any")) as running,
        ClientSession() as session,
        provider(Pool(running.url, running.hub, session)) as worker,
    ):
        async with session.post(
            f"{running.url}/v1/jobs/commit/cheap",
            json=COMMIT | {"webhook": {"url": receiver.url, "secret": SECRET}},
            headers={"Authorization": f"Bearer {running.api_key}"},
        ) as response:
            job_id = (await response.json())["job_id"]
        await worker.complete((await worker.job())["job_id"], {"ok": True})
        await eventually(lambda: len(receiver.requests) == 1)

    ((headers, body),) = receiver.requests
    assert verify(headers, body, SECRET.encode())
    assert headers["webhook-id"] == f"msg_{job_id}"
    assert json.loads(body)["data"]["result"] == {"ok": True}


async def test_open_jobs_are_recorded_by_the_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.app.background.RECORD_EVERY", 0.02)
    async with (
        run_coordinator(settings(tmp_path)) as running,
        ClientSession(
            headers={"Authorization": f"Bearer {running.api_key}"}
        ) as session,
        provider(Pool(running.url, running.hub, session)) as worker,
    ):
        for _ in range(3):
            url = f"{running.url}/v1/jobs/commit/cheap"
            async with session.post(url, json=COMMIT) as response:
                assert response.status == 201
        await worker.job()

        rows: list[dict[str, int]] = []
        while not any(row["running"] and row["queued"] > 1 for row in rows):
            async with session.get(f"{running.url}/admin/usage/minutes") as response:
                rows = (await response.json())["data"]


async def test_models_were_created_when_the_coordinator_was_set_up(
    tmp_path: Path,
) -> None:
    created = []
    for _ in range(2):
        async with (
            run_coordinator(settings(tmp_path)) as running,
            ClientSession() as session,
            provider(Pool(running.url, running.hub, session)),
            session.get(
                f"{running.url}/v1/models",
                headers={"Authorization": f"Bearer {running.api_key}"},
            ) as response,
        ):
            listed = (await response.json())["data"]
            created.append({each["created"] for each in listed})

    assert created == [{int(signing_key_created_at(tmp_path))}] * 2


async def test_port_of_ollama_is_named_if_it_is_in_use(tmp_path: Path) -> None:
    async with run_coordinator(settings(tmp_path / "one", ollama_port=0)) as running:
        taken = running.ollama_port
        named = pytest.RaisesExc(ConfigError, match="choose another --ollama-port")
        with pytest.RaisesGroup(named, flatten_subgroups=True):
            async with run_coordinator(settings(tmp_path / "two", ollama_port=taken)):
                pass


async def test_disabled_webhooks_are_not_delivered(tmp_path: Path) -> None:
    async with (
        run_coordinator(settings(tmp_path, webhooks="off")) as running,
        ClientSession(
            headers={"Authorization": f"Bearer {running.api_key}"}
        ) as session,
        session.post(
            f"{running.url}/v1/jobs/commit/cheap",
            json=COMMIT | {"webhook": {"url": "https://h/", "secret": SECRET}},
        ) as response,
    ):
        assert response.status == 400
        assert "--webhooks off" in (await response.json())["error"]


@pytest.mark.parametrize("words", ["tpu", "gpu,gpu", ",", "gpu,"])
def test_preferred_machines_are_of_known_kinds(words: str) -> None:
    known = f"--prefer {words}: expected some of gpu, mac, cpu, each once"
    with pytest.raises(ConfigError, match=known):
        read_settings(ServeConfig(prefer=words))


def test_no_kind_of_machine_is_preferred_by_default() -> None:
    assert read_settings(ServeConfig()).placement == PlacementRules()
    preferred = read_settings(ServeConfig(prefer="cpu, gpu")).placement.preference
    assert preferred == (MachineKind.CPU, MachineKind.GPU)


async def test_unknown_egress_policy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--webhooks all: expected public or any or"):
        async with run_coordinator(settings(tmp_path, webhooks="all")):
            pass


async def test_jobs_that_end_must_be_kept_for_a_while(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--keep-days 0: expected days, above 0"):
        async with run_coordinator(settings(tmp_path, keep_days=0.0)):
            pass


async def test_jobs_require_payment_with_a_facilitator(tmp_path: Path) -> None:
    async with run_facilitator() as facilitator:
        x402 = replace(PAID, facilitator=facilitator.url)
        async with (
            run_coordinator(settings(tmp_path, **PRICED), OPEN, x402) as running,
            ClientSession() as session,
            session.post(
                f"{running.url}/v1/jobs/commit/cheap", json=COMMIT
            ) as response,
        ):
            assert response.status == 402
            assert "PAYMENT-REQUIRED" in response.headers


async def test_payments_for_free_jobs_are_a_mistake(tmp_path: Path) -> None:
    free = settings(tmp_path, price_call="$1")

    with pytest.raises(ConfigError, match=r"all jobs are free.*--price-fast-inference"):
        async with run_coordinator(free, OPEN, PAID):
            pass


async def test_nobody_owes_anything_until_an_operator_sets_prices(
    tmp_path: Path,
) -> None:
    chat = {"model": "m1", "messages": [{"role": "user", "content": "hi"}]}
    async with (
        run_coordinator(settings(tmp_path)) as running,
        ClientSession() as session,
        provider(Pool(running.url, running.hub, session), price="$0.5") as worker,
        Pool(running.url, running.hub, session).node() as node,
    ):
        headers = {"Authorization": f"Bearer {running.api_key}"}

        async def ask(path: str, body: object = None) -> Any:
            method = "GET" if body is None else "POST"
            async with session.request(
                method, f"{running.url}{path}", json=body, headers=headers
            ) as response:
                assert response.ok, await response.text()
                return await response.json()

        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(ask("/v1/chat/completions", chat))
            await node.answer("hello")
        job_id = (await ask("/v1/jobs/commit/cheap", COMMIT))["job_id"]
        await worker.complete((await worker.job())["job_id"], {"ok": True})
        job = await ask(f"/v1/jobs/{job_id}?wait=30")
        quotes = [
            await ask(f"/v1/quote?job_type={kind}") for kind in ("TASK", "LLM_INFER")
        ]
        receipts = await ask("/v1/receipts")
        accounts = await ask("/admin/accounts")

    assert asked.result()["choices"][0]["message"]["content"] == "hello"
    assert (job["status"], job["price"]) == ("completed", "$0.000")
    assert [each["price"] for each in quotes] == ["$0.000", "$0.000"]
    assert [each["price"] for each in receipts["data"]] == [0, 0]
    assert accounts["data"] == []


async def test_unreachable_facilitator_at_start_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with run_coordinator(settings(tmp_path, **PRICED), OPEN, PAID):
            pass

    assert "payments do not work yet, so no jobs are accepted" in caplog.text


async def test_facilitator_without_the_network_prevents_the_start(
    tmp_path: Path,
) -> None:
    async with run_facilitator() as facilitator:
        x402 = replace(PAID, facilitator=facilitator.url, network="solana:other")
        with pytest.raises(ConfigError, match="--x402-network"):
            async with run_coordinator(settings(tmp_path, **PRICED), OPEN, x402):
                pass


async def test_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "shoal.gateway.jobs.x402", raising=False)
    monkeypatch.setitem(sys.modules, "x402", None)  # as if it were not installed

    with pytest.raises(ConfigError, match=r"which is not installed: .*\[x402\]"):
        async with run_coordinator(settings(tmp_path, **PRICED), OPEN, PAID):
            pass


async def test_a_broken_database_ends_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.app.background.BROKEN_NOTICE", 0.0)
    gone = "deleted or replaced"

    broken = pytest.RaisesExc(StoreBroken, match=gone)
    with pytest.RaisesGroup(broken, flatten_subgroups=True):
        async with run_coordinator(settings(tmp_path)) as running:
            await asyncio.to_thread((tmp_path / "shoal.db").unlink)
            with pytest.raises(StoreError, match=gone):
                await running.hub.process(AccountTopUp("a", 1, "admin"))
            await asyncio.Event().wait()


async def test_a_coordinator_ends_when_another_takes_its_database_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.app.background.BROKEN_NOTICE", 0.0)

    fenced = pytest.RaisesExc(Fenced, match="another coordinator has taken over")
    with pytest.RaisesGroup(fenced, flatten_subgroups=True):
        async with run_coordinator(settings(tmp_path)) as running:
            # As on a file system whose locks do not hold.
            with closing(sqlite3.connect(tmp_path / "shoal.db")) as other, other:
                take_over(other)
            with pytest.raises(Fenced):
                await running.hub.process(AccountTopUp("a", 1, "admin"))
            await asyncio.Event().wait()


async def test_checkpoint_that_cannot_be_recorded_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal.app.background.CHECK_EVERY", 0.0)
    asked = threading.Semaphore(0)
    show = SigningKeys.show

    async def counted(self: SigningKeys, head: LogHead | None) -> None:
        try:
            await show(self, head)
        except StoreError:
            asked.release()
            raise

    monkeypatch.setattr(SigningKeys, "show", counted)
    async with (
        run_coordinator(settings(tmp_path)) as running,
        ClientSession() as session,
        provider(Pool(running.url, running.hub, session)) as worker,
    ):
        (tmp_path / SIGNING_LOG_FILE).unlink()
        (tmp_path / SIGNING_LOG_FILE / "in the way").mkdir(parents=True)
        async with session.post(
            f"{running.url}/v1/jobs/commit/cheap",
            json=COMMIT,
            headers={"Authorization": f"Bearer {running.api_key}"},
        ):
            await worker.complete((await worker.job())["job_id"], {"ok": True})
        for _ in range(3):
            await eventually(lambda: asked.acquire(blocking=False))
        found = [each for each in caplog.messages if "cannot check" in each]

    file = tmp_path / SIGNING_LOG_FILE
    assert [each.partition(":")[2].startswith(f" {file}: ") for each in found] == [True]


async def test_additional_ports_are_announced(
    tmp_path: Path,
) -> None:
    async with (
        run_coordinator(settings(tmp_path)) as running,
        ClientSession() as session,
    ):

        async def told(headers: dict[str, str]) -> Any:
            url = f"{running.url}/healthz"
            async with session.get(url, headers=headers) as response:
                return (await response.json())["direct"]

        # TealeNet's peers are told by multicast, or by hand.
        assert running.ports.keys() == {"macfleet", "tealenet"}
        assert await told({}) == {"macfleet": running.ports["macfleet"]}
        # Everything listens on loopback, and the request comes through a proxy.
        assert await told({"X-Forwarded-For": "192.0.2.1"}) == {}
        assert await told({"Host": "pool.example"}) == {}


@pytest.fixture
def careless() -> Iterator[None]:
    """Let new files be readable by everybody, unless they are made otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.rglob("*")}


def readable_by_others(folder: Path) -> list[str]:
    """Return what others may do with a folder and all that is in it."""
    return [
        f"{each}: {stat.filemode(each.stat().st_mode)}"
        for each in (folder, *folder.rglob("*"))
        if each.stat().st_mode & 0o077
    ]


@pytest.mark.usefixtures("careless")
async def test_everything_in_the_data_folder_is_private(tmp_path: Path) -> None:
    folder, value = tmp_path / "data", b"a value" * 10_000
    digest = hashlib.sha256(value).hexdigest()

    async def store_value() -> None:
        async with (
            run_coordinator(settings(folder)) as running,
            ClientSession(
                headers={"Authorization": f"Bearer {running.api_key}"}
            ) as session,
        ):
            url = f"{running.url}/v1/blobs/{digest}"
            async with session.put(url, data=value) as stored:
                assert stored.status == 204
            found = names(folder)
            assert found > {"api-key", "url", "shoal.db-wal", "shoal.db-shm"}
            assert digest[2:] in found
            assert readable_by_others(folder) == []

    await store_value()
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o777)  # as an older version may have left them
    await store_value()
    data = ["--data-dir", str(folder)]
    assert main(["db", "backup", str(folder / "copy.db"), *data]) == 0
    assert main(["db", "compact", *data]) == 0

    assert readable_by_others(folder) == []


async def test_folder_that_others_share_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    os.mkdir(shared)
    os.chmod(shared, 0o1777)

    with pytest.raises(ConfigError, match="is shared with other users"):
        async with run_coordinator(settings(shared)):
            pass

    assert names(shared) == set()


async def test_peers_without_encryption_are_named_beyond_loopback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def listed() -> list[str]:
        mark = "not encrypted, if any connect: "
        messages = [record.getMessage() for record in caplog.records]
        return [each.removeprefix(mark) for each in messages if mark in each]

    for host in ("127.0.0.1", "0.0.0.0"):
        config = ServeConfig(
            host=host, port=0, data_dir=tmp_path, no_discovery=True, drain=0.0
        )
        async with run_coordinator(config):
            pass
        assert bool(listed()) is (host == "0.0.0.0")

    (line,) = listed()
    assert line == "workers (dispatch), nodes (grandsage)"


@pytest.mark.parametrize(
    ("config", "anyone", "expected"),
    [
        (TealeConfig(), False, {}),
        (TealeConfig(), True, {"tealenet": "peers"}),
        (TealeConfig(passcode="p"), False, {"tealenet": "peers"}),
        (TealeConfig(open=True), False, {"tealenet": "peers"}),
        (TealeConfig(peers=("mac:1",)), False, {"tealenet": "peers"}),
    ],
)
def test_tealenets_peers_are_named_where_one_can_be_admitted(
    config: TealeConfig, anyone: bool, expected: dict[str, str]
) -> None:
    wires = {"tealenet": config}

    assert plain_peers(wires, tls=True, anyone=anyone) == expected
