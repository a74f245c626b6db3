import json

import pytest
from rich.console import Console

from shoal.cli import terminal
from shoal.cli.terminal import Columns, format_day, printable, show_table, table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    columns: Columns = {"A": "a", "LONG": lambda row: row["b"] * 2, "C": "c"}
    rows = [{"a": "aaa", "b": 1, "c": ""}, {"a": "a", "b": 2, "c": "c"}]

    assert table(columns, rows) == ["A    LONG  C", "aaa  2", "a    4     c"]


def test_narrow_terminal_folds_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "console", lambda: Console(width=40))
    row = {"id": 24 * "0", "error": "it is longer than the line"}

    lines = table({"ID": "id", "ERROR": "error"}, [row])

    assert 24 * "0" in lines[1]
    assert len(lines) > 2


def test_table_without_rows_is_its_head_or_a_remark(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_table({}, False, {"A": "a", "B": "b"}, [])
    show_table({}, False, {"A": "a", "B": "b"}, [], "no rows")

    assert capsys.readouterr().out == "A  B\nno rows\n"


def test_json_is_the_answer_itself(capsys: pytest.CaptureFixture[str]) -> None:
    show_table({"data": [{"a": 1}]}, True, {"A": "a"}, [{"a": 1}])

    assert json.loads(capsys.readouterr().out) == {"data": [{"a": 1}]}


def test_names_cannot_move_the_cursor() -> None:
    assert table({"A": "a"}, [{"a": "\x1b[2J\r\nevil"}]) == [
        "A",
        "\\x1b[2J\\x0d\\nevil",
    ]


def test_names_cannot_change_the_direction_of_text() -> None:
    controls = (
        "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    )

    assert printable(controls) == "".join(f"\\u{ord(each):04x}" for each in controls)
    assert printable("שלום é 🦦") == "שלום é 🦦"


def test_time_is_formatted_in_utc_minutes() -> None:
    assert format_day(1_795_261_957.4) == "2026-11-21 11:52Z"
    assert format_day(None) == ""
