"""How quick a line is to which one end of two is connected."""

import asyncio

import pytest

from shoal.transports.splice import Spliced


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    return clock


def cycle(end: Spliced, clock: Clock, sent: int, fills: float, drains: float) -> None:
    """Write until too much is unsent, and wait until that has been sent."""
    clock.now += fills
    end.write(bytes(sent))
    end.pause_writing()
    clock.now += drains
    end.resume_writing()


async def test_rate_is_that_of_the_time_in_which_the_line_held_up(clock: Clock) -> None:
    end = Spliced()

    cycle(end, clock, sent=999, fills=0.0, drains=7.0)  # some of it stays unsent
    cycle(end, clock, sent=50, fills=1.0, drains=4.0)
    cycle(end, clock, sent=70, fills=2.0, drains=3.0)
    cycle(end, clock, sent=80, fills=60.0, drains=1.0)  # there was little to send

    assert (end.sent, end.held_up) == (120, 10.0)


async def test_rate_is_unknown_where_nothing_had_to_wait(clock: Clock) -> None:
    end = Spliced()

    for _ in range(9):
        clock.now += 1.0
        end.write(b"quick")

    assert (end.sent, end.held_up) == (0, 0.0)
