"""The times at which a machine may work."""

from datetime import datetime

import pytest

from shoal.config.schedule import is_open, parse_window
from shoal.domain.errors import ConfigError

MONDAY = 5  # of January 2026


def at(day: int, hour: int, minute: int = 0) -> datetime:
    """Return a local time; day 0 is a Monday."""
    return datetime(2026, 1, MONDAY + day, hour, minute)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("09:00-17:00", [(0, 9), (6, 16, 59)], [(0, 8, 59), (0, 17), (0, 0)]),
        ("22:00-07:00", [(0, 22), (0, 6, 59), (6, 23)], [(0, 7), (0, 21, 59)]),
        ("mon-fri 18:00-08:00", [(0, 18), (5, 7, 59)], [(5, 18), (0, 7), (6, 23)]),
        ("sat-mon 0:00-24:00", [(5, 0), (6, 12), (0, 23, 59)], [(1, 0), (4, 23, 59)]),
        ("sun 20:00-04:00", [(6, 20), (0, 3)], [(6, 3), (0, 20), (1, 3)]),
        ("FRI 10:00-11:00", [(4, 10, 30)], [(3, 10, 30)]),
        ("12:00-12:00", [(0, 12), (1, 0), (1, 11, 59)], []),
    ],
)
def test_window_contains_its_times(
    text: str, inside: list[tuple[int, ...]], outside: list[tuple[int, ...]]
) -> None:
    window = parse_window(text)

    assert [each for each in inside if not window.contains(at(*each))] == []
    assert [each for each in outside if window.contains(at(*each))] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a time such as"),
        ("22-7", "expected a time such as"),
        ("22:00", "expected a time such as"),
        ("mon,tue 22:00-07:00", "expected a time such as"),
        ("foo 22:00-07:00", "unknown day foo"),
        ("mon-bar 22:00-07:00", "unknown day bar"),
        ("24:01-07:00", "there is no time 24:01"),
        ("12:00-07:60", "there is no time 07:60"),
        ("\u0661\u0662:00-07:00", "expected a time such as"),
    ],
)
def test_invalid_window_is_rejected(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_window(text)


def test_schedule_is_open_in_any_of_its_windows() -> None:
    night, weekend = parse_window("22:00-07:00"), parse_window("sat-sun 0:00-24:00")

    assert is_open((), at(0, 12))
    assert is_open((night, weekend), at(5, 12))
    assert is_open((night, weekend), at(0, 23))
    assert not is_open((night, weekend), at(0, 12))
