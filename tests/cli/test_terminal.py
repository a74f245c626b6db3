import pytest

from shoal.cli.terminal import format_day, print_table


def test_columns_are_as_wide_as_their_widest_cell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("A", "LONG", "C"), [("aaa", "b", ""), ("a", "b", "c")])

    assert capsys.readouterr().out == "A    LONG  C\naaa  b\na    b     c\n"


def test_table_without_rows_is_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A", "B"), [])

    assert capsys.readouterr().out == "A  B\n"


def test_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("A",), [("\x1b[2J\r\nevil",)])

    assert capsys.readouterr().out == "A\n\\x1b[2J\\x0d\\nevil\n"


def test_time_is_formatted_in_utc_minutes() -> None:
    assert format_day(1_795_261_957.4) == "2026-11-21 11:52Z"
    assert format_day(None) == ""
