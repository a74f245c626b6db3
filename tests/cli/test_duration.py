from argparse import ArgumentTypeError

import pytest

from shoal.cli.duration import duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("30d", 2_592_000),
        ("2w", 1_209_600),
        ("007s", 7),
    ],
)
def test_duration_is_read_as_people_write_it(text: str, seconds: int) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "5", "d", "0s", "-1d", "1.5h", "1 d", "1D", "1y", "\u0661d", "9" * 10 + "s"],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="such as 12h or 30d"):
        duration(text)
