"""Revocation asks for confirmation at a terminal, and nowhere else."""

import io
import json
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.client.coordinator import CoordinatorApi


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("flags", "after"),
    [
        ([], None),
        (["--hosted"], 20),
        (["--hosted", "--hosted-after", "2m"], 120),
    ],
)
def test_hosted_providers_are_for_keys_that_ask_for_them(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], after: int | None
) -> None:
    bodies: list[dict[str, Any]] = []

    def request(api: CoordinatorApi, path: str, body: dict[str, Any]) -> Any:
        bodies.append(body)
        return {**body, "key": "sk-1", "expires_at": None}

    monkeypatch.setattr(CoordinatorApi, "request", request)

    assert main(["keys", "create", "alice", "--json", *flags]) == 0
    (body,) = bodies
    assert body.get("hosted_after") == after


@pytest.fixture
def revoked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were deleted."""
    paths: list[str] = []

    def request(api: CoordinatorApi, path: str, *, method: str) -> dict[str, str]:
        assert method == "DELETE"
        paths.append(path)
        return {"name": "alice", "id": "k1"}

    monkeypatch.setattr(CoordinatorApi, "request", request)
    return paths


def revoke(*flags: str) -> int:
    return main(["keys", "revoke", "al/ice", "--json", *flags])


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

    assert revoke() == status

    assert revoked == ["/admin/keys/al%2Fice"][status:]
    asked = "Revoke al/ice?  Requests that use it are cancelled. [y/N]:"
    assert capsys.readouterr().err.strip() == asked


def test_flag_and_pipe_need_no_confirmation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    revoked: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert revoke("--yes") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert revoke() == 0

    output = capsys.readouterr()
    assert output.err == ""
    assert [json.loads(line)["id"] for line in output.out.splitlines()] == ["k1", "k1"]
    assert len(revoked) == 2
