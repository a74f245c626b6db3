import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import ConfigError
from shoal.domain.money import DOLLARS_MAX, MICROS, dollars, parse_dollars


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("$0.010", 10_000),
        ("0.01", 10_000),
        ("5", 5_000_000),
        ("$5", 5_000_000),
        ("0", 0),
        ("000.000001", 1),
        ("1.999999", 1_999_999),
        (str(DOLLARS_MAX), DOLLARS_MAX * MICROS),
        ("0" * 5000 + "1", MICROS),
    ],
)
def test_dollars_are_read_as_people_write_them(text: str, micros: int) -> None:
    assert parse_dollars(text) == micros


@pytest.mark.parametrize(
    "text",
    [
        "",
        "$",
        ".5",
        "5.",
        "-1",
        "+1",
        "1e3",
        "1,000",
        " 5",
        "5 ",
        "$$5",
        "5$",
        "nan",
        "inf",
        "0x5",
        "1_000",
        "\u0661",
        "five",
        "1\n",
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="expected dollars such as"):
        parse_dollars(text)


def test_a_part_of_a_micro_dollar_is_refused() -> None:
    with pytest.raises(ConfigError, match="7 decimals, and money at most 6"):
        parse_dollars("0.0000010")


@pytest.mark.parametrize(
    "text", [f"{DOLLARS_MAX}.000001", f"{DOLLARS_MAX + 1}", "9" * 100_000]
)
def test_more_than_the_limit_is_refused_and_shown_in_short(text: str) -> None:
    with pytest.raises(ConfigError, match=r"more than the limit of \$1,000") as error:
        parse_dollars(text)

    assert len(str(error.value)) < 120


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (10_000, "$0.010"),
        (-10_000, "-$0.010"),
        (0, "$0.000"),
        (1, "$0.000001"),
        (12_500, "$0.0125"),
        (5_000_000, "$5.000"),
        (1_234_567_890, "$1234.56789"),
    ],
)
def test_dollars_are_written_with_three_decimals_or_more(
    micros: int, text: str
) -> None:
    assert dollars(micros) == text


@given(st.integers(0, DOLLARS_MAX * MICROS))
def test_what_is_written_is_read_as_the_same(micros: int) -> None:
    assert parse_dollars(dollars(micros)) == micros
