"""The models command without a peer."""

import asyncio
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.filesize import decimal

from cli.coordinators import Sites
from engines.outputs import TINY
from models.test_safetensors_files import a_model
from shoal.cli.main import main
from shoal.models.safetensors_files import ENGINES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for path, size in {
        "alone.gguf": 10,
        "parts-00001-of-00002.gguf": 1000,
        "parts-00002-of-00002.gguf": 500,
        "broken-00001-of-00002.gguf": 1,
        "org/name/config.json": 2,
        "org/name/model.gguf": 4_000_000,
        "org/name/.cache/x": 7,
        "host/org/name/weights.safetensors": 3,
        ".incoming/id/files/half.gguf": 5,
        "_private/x.gguf": 6,
        "README": 8,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"GGUF".ljust(size)[:size])
    return folder


def test_local_models_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "ls", "--in", str(folder), "--json"]) == 0

    listed = json.loads(capsys.readouterr().out)["data"]
    assert [(each["name"], each["size"], each["files"]) for each in listed] == [
        ("alone", 10, 1),
        ("host/org/name", 3, 1),
        ("org/name", 4_000_002, 2),
        ("parts-00001-of-00002", 1500, 2),
    ]
    assert [each["gguf"] and Path(each["gguf"]).name for each in listed] == [
        "alone.gguf",
        None,
        "model.gguf",
        "parts-00001-of-00002.gguf",
    ]


def test_listing_is_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["models", "ls", "--in", str(folder)])

    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "org/name " in line
    ][1:]
    assert line.split() == ["org/name", "4.0", "MB", "2", str(folder / "org" / "name")]


def test_models_of_other_programs_are_listed_with_what_runs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = a_model(tmp_path, "vectors")
    gguf = tmp_path / "models--org--Tiny-GGUF" / "snapshots" / "abc" / "tiny.gguf"
    gguf.parent.mkdir(parents=True)
    shutil.copy(TINY, gguf)

    assert main(["models", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["elsewhere"]
    mine = [each for each in found if each["path"] in (str(folder), str(gguf))]
    assert [(each["name"], each["engine"]) for each in mine] == [
        ("org/vectors", ENGINES),
        ("tiny", "embedded"),
    ]
    assert all(each["size"] < each["memory"] for each in mine)

    main(["models", "ls"])
    said = capsys.readouterr().out
    assert "of other programs on this machine:" in said
    (line,) = [line for line in said.splitlines() if "org/vectors" in line]
    assert f"F16      4096     {decimal(mine[0]['memory'])}" in line
    assert ENGINES in line


def test_empty_folder_has_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))

    main(["models", "ls"])

    said = capsys.readouterr().out
    assert str(tmp_path / "models") in said
    assert "shoal models get NAME --from" in said


OFFERED = {
    "id": "qwen3-8b",
    "kinds": ["chat", "embed"],
    "features": ["stop", "tools"],
    "context_window": 4096,
    "state": "loaded",
    "workers": 2,
    "slots": 8,
}


PLACES = ["SIZE", "LOADED", "ON", "ON", "DISK", "OF", "WOULD", "FIT"]


async def models(sites: Sites, *arguments: str) -> int:
    """Return the exit status of ``shoal models`` with a pool of one model."""
    url = await sites({"/v1/models": {"data": [OFFERED]}})
    given = [*arguments, "--url", url, "--api-key", "sk-test"]
    return await asyncio.to_thread(main, ["models", *given])


async def test_models_of_the_pool_are_listed_after_those_here(
    folder: Path, sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await models(sites, "ls", "--in", str(folder)) == 0

    here, _, pool = capsys.readouterr().out.partition("\nin the pool at http://")
    assert "org/name" in here
    assert [line.split() for line in pool.splitlines()[1:]] == [
        ["NAME", "DOES", "CONTEXT", "STATE", "SLOTS", *PLACES],
        ["qwen3-8b", "chat,", "embed", "4096", "loaded", "8", "2", "workers", "0"],
    ]

    await models(sites, "ls", "--in", str(folder), "--json")
    assert json.loads(capsys.readouterr().out)["pool"] == [OFFERED]


async def test_models_of_the_pool_are_listed_with_their_machines(
    folder: Path, sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = {"id": "shoal:anna/qwen3-8b", "name": "anna", "busy": 0, "slots": 8}
    ben = {"node": "shoal:ben", "name": "", "size": 5, "memory": 7, "engine": "x"}
    placed = {
        **{"id": "qwen3-8b", "size": 5_000_000_000, "workers": [worker, worker]},
        **{"stored": [ben], "fits": [{"node": "c", "fits": True, "why": "room"}]},
    }
    listed = {"/v1/models": {"data": [OFFERED]}, "/admin/models": {"data": [placed]}}
    url = await sites(listed)
    given = ["ls", "--in", str(folder), "--url", url, "--api-key", "sk-test"]

    assert await asyncio.to_thread(main, ["models", *given]) == 0

    *_, line = capsys.readouterr().out.splitlines()
    assert line.split()[-7:] == ["loaded", "8", "5.0", "GB", "anna", "shoal:ben", "1"]


def test_models_here_are_listed_if_the_pool_does_not_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = ("--url", "http://127.0.0.1:1", "--api-key", "sk-test")
    assert main(["models", "ls", "--in", str(folder), "--json", *away]) == 0

    said = capsys.readouterr()
    listed = json.loads(said.out)
    assert (len(listed["data"]), listed["pool"]) == (4, None)
    assert said.err.startswith("the pool's models are unknown: ")


async def test_a_model_is_shown_where_it_is(
    folder: Path, sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await models(sites, "show", "qwen3-8b", "--in", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "qwen3-8b",
        "stored": None,
        "pool": OFFERED,
    }

    assert await models(sites, "show", "qwen3-8b", "--in", str(folder)) == 0
    assert "requests may ask for: stop, tools" in capsys.readouterr().out

    assert await models(sites, "show", "org/name", "--in", str(folder)) == 0
    assert "(2 files, 4.0 MB)\nto offer it: shoal join" in capsys.readouterr().out

    assert await models(sites, "show", "qwen38b", "--in", str(folder)) == 1
    assert "no model 'qwen38b'; did you mean qwen3-8b?" in capsys.readouterr().err


def test_a_model_is_deleted_with_all_its_parts_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("parts-00001-of-00002", "host/org/name", "alone"):
        assert main(["models", "rm", name, "--in", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == name

    assert {each.name for each in folder.iterdir()} == {
        *("broken-00001-of-00002.gguf", "org", ".incoming", "_private", "README")
    }
    assert main(["models", "rm", "org/nam", "--in", str(folder)]) == 1
    assert "did you mean org/name?" in capsys.readouterr().err


def test_what_may_hold_other_models_is_not_deleted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "org" / "name" / "other").mkdir()

    assert main(["models", "rm", "org/name", "--in", str(folder)]) == 1

    assert "has the folder other" in capsys.readouterr().err
    assert (folder / "org" / "name" / "model.gguf").is_file()


@pytest.mark.parametrize("answer", ["n", "y"])
def test_at_a_terminal_deleting_is_asked_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    stdin = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)

    main(["models", "rm", "alone", "--in", str(folder)])

    assert (folder / "alone.gguf").exists() == (answer == "n")


def test_of_a_link_only_the_link_is_deleted(folder: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "x.gguf").touch()
    (folder / "linked").symlink_to(theirs, target_is_directory=True)

    assert main(["models", "rm", "linked", "--in", str(folder)]) == 0

    assert (theirs / "x.gguf").exists()
    assert not (folder / "linked").is_symlink()


@pytest.mark.parametrize(
    "where",
    [
        *("here", "here:", "here:x", ":4000", "here:99999", "[::1"),
        *("tls://here", "http://", "https://:4010", "http://here:x", "ws://here:80"),
    ],
)
def test_source_requires_a_host_and_a_peer_its_port(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "get", "m", "--from", where]) == 1

    reason = f"--from {where}: expected the URL of a coordinator, such as http://"
    assert reason in capsys.readouterr().err


def test_invalid_model_name_is_rejected_locally(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["models", "get", "../m", "--from", "127.0.0.1:1"]) == 1

    assert "'../m' is not a valid name of a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "why"),
    [
        ("name", "--share name: expected NAME=PATH"),
        ("=path", "--share =path: expected NAME=PATH"),
        ("../x=.", "'../x' is not a valid name of a model"),
        ("m=/nowhere", "m cannot be shared: /nowhere: no such file"),
    ],
)
def test_unshareable_model_fails_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: str, why: str
) -> None:
    data = str(tmp_path / "data")

    assert main(["serve", "--port", "0", "--data-dir", data, "--share", share]) == 1

    assert why in capsys.readouterr().err


STUDIO: dict[str, object] = {
    "peer": "tealenet:AB",
    "name": "Studio",
    "size": 4831838208,
    "address": "tcp://192.0.2.1:41234",
    "passed_on": False,
}
WORKER = {**STUDIO, "peer": "tealenet:w", "name": "w", "passed_on": True}
OWN = {**WORKER, "peer": "", "name": "", "size": None, "address": ""}
DIALLING = {**STUDIO, "peer": "tealenet:CD", "name": "", "address": ""}


async def find(
    sites: Sites, copies: list[dict[str, object]], *more: str
) -> tuple[int, str]:
    """Return the exit code of ``shoal models find`` and the coordinator's URL."""
    found = {"model": "org/m", "asked": 3, "data": copies}
    health = {"status": "ok", "shoal": "1", "direct": {"tealenet": {"tcp": 4011}}}
    url = await sites({"/admin/models/org/m": found, "/healthz": health})
    given = ["find", "org/m", "--url", url, "--api-key", "sk-test", *more]
    return await asyncio.to_thread(main, ["models", *given]), url


async def test_found_copies_are_listed_with_the_addresses_to_copy_from(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    code, url = await find(sites, [OWN, WORKER, STUDIO, DIALLING])

    assert code == 0
    assert [each.split() for each in capsys.readouterr().out.splitlines()] == [
        ["PEER", "SIZE", "FROM"],
        ["this", "coordinator", url],
        ["tealenet:w", "4.8", "GB", url],
        ["Studio", "(tealenet:AB)", "4.8", "GB", "192.0.2.1:41234"],
        ["tealenet:CD", "4.8", "GB"],
        [
            *("to", "copy", "it:", "shoal", "models", "get", "org/m"),
            *("--from", url, "--token", "JOIN_TOKEN"),
        ],
    ]


async def test_how_to_find_the_address_of_a_peer_that_dialled_is_said(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = await find(sites, [DIALLING])

    assert code == 0
    assert "dns-sd -B _teale._tcp" in capsys.readouterr().out


async def test_a_model_that_no_peer_has_fails(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = await find(sites, [])

    assert code == 1
    assert capsys.readouterr().out == (
        "no peer shares org/m (3 peers queried); to share it: shoal serve --share "
        "NAME=PATH, or shoal join --model NAME=PATH, where it is\n"
    )


async def test_found_copies_are_printed_as_json(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    await find(sites, [STUDIO], "--json")

    assert json.loads(capsys.readouterr().out)["data"] == [STUDIO]
