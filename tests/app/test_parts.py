"""The processes of a coordinator with fronts."""

import sys

import pytest

from shoal.app.parts import PART, FrontPart, HubPart, check_fronts, this_part
from shoal.domain.errors import ConfigError


@pytest.mark.parametrize("count", [-1, 65])
def test_fronts_have_a_limit(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--fronts {count}: expected 0 to 64"):
        check_fronts(count)


def test_fronts_need_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    check_fronts(0)
    with pytest.raises(ConfigError, match="Windows has no Unix sockets"):
        check_fronts(1)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            '{"type": "HubPart", "folder": "/s", "host": "::", "port": 4010, '
            '"ollama_port": null, "announces": false}',
            HubPart("/s", "::", 4010, None, announces=False),
        ),
        (
            '{"type": "FrontPart", "folder": "/s", "of": 2, "http": [5, 6], '
            '"ollama": []}',
            FrontPart("/s", 2, (5, 6), ()),
        ),
    ],
)
def test_a_process_learns_which_part_it_is(
    given: str, part: HubPart | FrontPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PART, raising=False)
    assert this_part() is None

    monkeypatch.setenv(PART, given)
    assert this_part() == part
