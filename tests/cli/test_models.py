"""The models command without a peer."""

import asyncio
import json
from pathlib import Path

import pytest

from cli.coordinators import Sites
from shoal.cli.main import main


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


def test_empty_folder_has_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))

    main(["models", "ls"])

    said = capsys.readouterr().out
    assert str(tmp_path / "models") in said
    assert "shoal models get NAME --from" in said


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
        "no peer shares org/m (3 peers asked); to share it: shoal serve --share "
        "NAME=PATH, or shoal join --model NAME=PATH, where it is\n"
    )


async def test_found_copies_are_printed_as_json(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    await find(sites, [STUDIO], "--json")

    assert json.loads(capsys.readouterr().out)["data"] == [STUDIO]
