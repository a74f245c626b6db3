"""The fleet command pairs machines by a URL."""

import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from socket import gethostname

import pytest

from protocols.macfleet.recorded import case_of
from shoal.app.fleet_files import FILE, load_fleet, with_fleet
from shoal.cli.access.fleet import qr_lines
from shoal.cli.main import main
from shoal.config.secret_files import TOKEN_FILE
from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet.addresses import FLEETS
from shoal.protocols.macfleet.local_node import Config

URL = "macfleet://pair?token=tok%20en-1234&fleet=lab%207"
MODULES = 25  # of a side of a QR code of version 2
FORMAT_MASK = 0b101010000010010
LEVEL_L = 0b01
MASKS: tuple[Callable[[int, int], int], ...] = (
    lambda row, column: (row + column) % 2,
    lambda row, column: row % 2,
    lambda row, column: column % 3,
    lambda row, column: (row + column) % 3,
    lambda row, column: (row // 2 + column // 3) % 2,
    lambda row, column: row * column % 2 + row * column % 3,
    lambda row, column: (row * column % 2 + row * column % 3) % 2,
    lambda row, column: ((row + column) % 2 + row * column % 3) % 2,
)
"""What is inverted in a code where it is 0 (ISO/IEC 18004, 7.8.2)."""

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data folder, in a home where nothing else is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("MACFLEET_TOKEN", raising=False)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_paired_machine_stores_token_and_name(folder: Path, capsys: Printed) -> None:
    assert main(["fleet", "pair", URL]) == 0
    assert "the fleet 'lab 7'" in capsys.readouterr().out

    assert load_fleet(folder, FLEETS) == ("tok en-1234", "lab 7")
    assert main(["fleet", "pair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": URL, "fleet": "lab 7"}


def test_coordinator_uses_the_machines_fleet(folder: Path) -> None:
    main(["fleet", "pair", URL])

    config = with_fleet(Config(), FLEETS, folder)

    assert (config.token, config.fleet) == ("tok en-1234", "lab 7")
    other = Config(token="another-token")
    assert with_fleet(other, FLEETS, folder) is other
    opened = Config(open=True)
    assert with_fleet(opened, FLEETS, folder) is opened


def test_url_can_be_piped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"  {URL}\n"))

    assert main(["fleet", "pair", "--stdin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "fleet": "lab 7",
        "files": [str(folder / FILE)],
    }


def test_unpaired_coordinator_invites_into_its_own_fleet(
    folder: Path, capsys: Printed
) -> None:
    folder.mkdir()
    (folder / TOKEN_FILE).write_text("join-token-1\n")

    assert main(["fleet", "pair"]) == 0

    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "macfleet://pair?token=join-token-1"
    assert set("".join(printed[2:-6])) <= set(" ▄▀█")
    assert printed[-5].startswith("The URL contains the fleet's token")
    assert printed[-3:-1] == ["on the other machine:", "  shoal fleet pair --stdin"]
    join = f"  shoal join --wire macfleet {gethostname()}:50051 --tasks MODULE"
    assert printed[-1] == join


def test_settings_take_precedence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    main(["fleet", "pair", URL])
    capsys.readouterr()
    monkeypatch.setenv("SHOAL_MACFLEET_TOKEN", "said-otherwise")

    assert main(["fleet", "pair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fleet"] == ""


def test_secret_files_are_private(folder: Path) -> None:
    shared = folder.parent / ".macfleet" / "fleet-token"
    shared.parent.mkdir(mode=0o755)
    shared.write_text("old")
    shared.chmod(0o644)

    assert main(["fleet", "pair", URL, "--share"]) == 0

    assert shared.read_text() == "tok en-1234\n"
    if os.name == "posix":
        assert (mode(shared), mode(shared.parent)) == (0o600, 0o700)
        assert mode(folder / FILE) == 0o600


def test_token_of_other_programs_can_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    shared = folder.parent / ".macfleet" / "fleet-token"
    shared.parent.mkdir()
    shared.write_text("  their-token \n")
    shared.chmod(0o644)

    assert main(["fleet", "pair", "--theirs"]) == 0

    assert load_fleet(folder, FLEETS) == ("their-token", "")
    if os.name == "posix":
        assert f"chmod 600 {shared}" in capsys.readouterr().err
    monkeypatch.setenv("MACFLEET_TOKEN", "their-variable")
    assert main(["fleet", "pair", "--theirs"]) == 0
    assert load_fleet(folder, FLEETS) == ("their-variable", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "shoal serve creates one"),
        (["http://pair?token=abcdefgh"], "not a pairing URL"),
        (["macfleet://pair?fleet=x"], "has no token"),
        (["macfleet://pair?token=short"], "at least 8 characters"),
        ([URL, "--theirs"], "only one of URL"),
        (["--theirs"], "neither MACFLEET_TOKEN"),
    ],
)
def test_impossible_action_is_an_error(
    folder: Path, capsys: Printed, arguments: list[str], message: str
) -> None:
    assert main(["fleet", "pair", *arguments]) == 1

    assert message in capsys.readouterr().err
    assert not (folder / FILE).exists()


def test_error_names_a_damaged_file(folder: Path) -> None:
    folder.mkdir()
    (folder / FILE).write_text("nonsense\n")

    with pytest.raises(ConfigError, match=r"fleet: not a pairing URL.*delete it"):
        load_fleet(folder, FLEETS)


def test_qr_code_matches_that_of_other_programs() -> None:
    """They differ in what fills the rest after the content, and so in the mask."""
    case = case_of("qr/short url")
    content, expected = case["input"]["content"], case["expect"]["lines"]

    lines = qr_lines(content)

    assert [len(line) for line in lines] == [len(line) for line in expected]
    assert _format(lines) >> 3 == _format(expected) >> 3 == LEVEL_L
    size = 12 + 8 * len(content)  # bits: the mode, the size, and the content
    assert _data(lines)[:size] == _data(expected)[:size]
    written = int(_data(lines)[12:size], 2).to_bytes(len(content))
    assert written == content.encode()


def _modules(lines: list[str]) -> list[list[int]]:
    """Return the modules of a code in text, without its border."""
    rows: list[list[int]] = []
    for line in lines:
        rows += [[int(each in half) for each in line] for half in ("▀█", "▄█")]
    return [row[1 : MODULES + 1] for row in rows[1 : MODULES + 1]]


def _format(lines: list[str]) -> int:
    """Return the level of correction and the mask (ISO/IEC 18004, 7.9)."""
    modules = _modules(lines)
    bits = [modules[8][place] for place in (0, 1, 2, 3, 4, 5, 7, 8)]
    bits += [modules[place][8] for place in (7, 5, 4, 3, 2, 1, 0)]
    return (int("".join(map(str, bits)), 2) ^ FORMAT_MASK) >> 10


def _data(lines: list[str]) -> str:
    """Return the bits of a code of version 2, in their order (ISO/IEC 18004, 7.7)."""
    modules = _modules(lines)
    mask = MASKS[_format(lines) & 7]
    bits: list[int] = []
    upwards = True
    for right in (*range(MODULES - 1, 6, -2), 5, 3, 1):
        for row in reversed(range(MODULES)) if upwards else range(MODULES):
            for column in (right, right - 1):
                if not _is_fixed(row, column):
                    bits.append(modules[row][column] ^ (not mask(row, column)))
        upwards = not upwards
    return "".join(map(str, bits))


def _is_fixed(row: int, column: int) -> bool:
    far = MODULES - 8
    corners = (row < 9 and (column < 9 or column >= far)) or (row >= far and column < 9)
    aligns = 16 <= row <= 20 and 16 <= column <= 20
    return corners or aligns or 6 in (row, column)
