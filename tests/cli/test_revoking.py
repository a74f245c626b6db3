import io
from argparse import Namespace

import pytest

from shoal.cli.revoking import confirmed


class Terminal(io.StringIO):
    """Standard input with somebody before it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)],
)
def test_somebody_at_a_terminal_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str,
    meant: bool,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(typed))

    assert confirmed(Namespace(name="alice", yes=False), "It ends.") is meant

    assert capsys.readouterr().err == "Revoke alice?  It ends.  [y/N] "


def test_nobody_is_asked_who_has_said_so_or_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert confirmed(Namespace(name="alice", yes=True), "It ends.")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert confirmed(Namespace(name="alice", yes=False), "It ends.")

    assert capsys.readouterr().err == ""
