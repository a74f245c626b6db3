"""Revocation asks for confirmation at a terminal, and nowhere else."""

import io
import json
from argparse import Namespace

import pytest

from shoal.cli import api
from shoal.cli.credentials import revoke_credential


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def revoked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were deleted."""
    paths: list[str] = []

    def request(args: Namespace, path: str, *, method: str) -> dict[str, str]:
        assert method == "DELETE"
        paths.append(path)
        return {"name": "alice", "id": "k1"}

    monkeypatch.setattr(api, "request", request)
    return paths


def revoke(*, yes: bool) -> int:
    args = Namespace(name="al/ice", yes=yes, json=True)
    return revoke_credential(args, "/admin/keys", "It ends.")


@pytest.mark.parametrize(
    ("typed", "status"),
    [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("", 1)],
)
def test_terminal_requires_confirmation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    revoked: list[str],
    typed: str,
    status: int,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(typed))

    assert revoke(yes=False) == status

    assert revoked == ["/admin/keys/al%2Fice"][status:]
    assert capsys.readouterr().err == "Revoke al/ice?  It ends.  [y/N] "


def test_flag_and_pipe_need_no_confirmation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    revoked: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert revoke(yes=True) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert revoke(yes=False) == 0

    output = capsys.readouterr()
    assert output.err == ""
    assert [json.loads(line)["id"] for line in output.out.splitlines()] == ["k1", "k1"]
    assert len(revoked) == 2
