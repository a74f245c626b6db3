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
def test_usual_dollar_amounts_are_parsed(text: str, micros: int) -> None:
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
def test_other_text_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="expected dollars such as"):
        parse_dollars(text)


def test_fraction_of_a_micro_dollar_is_rejected() -> None:
    with pytest.raises(ConfigError, match="7 decimals, and money at most 6"):
        parse_dollars("0.0000010")


@pytest.mark.parametrize(
    "text", [f"{DOLLARS_MAX}.000001", f"{DOLLARS_MAX + 1}", "9" * 100_000]
)
def test_amount_above_the_limit_is_rejected_and_abbreviated(text: str) -> None:
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
def test_dollars_have_at_least_three_decimals(micros: int, text: str) -> None:
    assert dollars(micros) == text


@given(st.integers(0, DOLLARS_MAX * MICROS))
def test_amounts_round_trip(micros: int) -> None:
    assert parse_dollars(dollars(micros)) == micros
