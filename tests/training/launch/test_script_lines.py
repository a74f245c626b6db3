"""The numbers in what a script prints."""

import pytest

from shoal.training.launch.script_lines import (
    OutputLines,
    hash_in,
    report,
    report_hash,
    values_in,
)
from shoal.training.run_events import LINE_MAX


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("step=12 loss=3.25", {"step": 12, "loss": 3.25}),
        ("step=0 loss=1e-3 lr=-.5", {"step": 0, "loss": 1e-3, "lr": -0.5}),
        ("loss=2", {"loss": 2}),
        ("[0] step=3, a/b=0.75;", {"step": 3, "a/b": 0.75}),
        ("x=1 y=2", {}),
        ("loss=nan step=4", {"step": 4}),
        ("loss=high", {}),
        ("the steps=3 of it", {}),
        ("", {}),
    ],
)
def test_lines_with_a_step_or_a_loss_are_reports(
    line: str, values: dict[str, float]
) -> None:
    assert values_in(line) == (values, True)


def test_report_is_read_and_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_RUN", "r")

    report(step=3, loss=0.5, samples_per_s=1e3)

    line = capsys.readouterr().out.rstrip("\n")
    assert values_in(line) == ({"step": 3, "loss": 0.5, "samples_per_s": 1000}, False)


def test_hash_is_read_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_RUN", "r")

    report_hash(100, b"\x5a" * 32)

    line = capsys.readouterr().out.rstrip("\n")
    assert hash_in(line) == (100, "5a" * 32)
    assert hash_in(line[:-1]) is hash_in("step=1") is None


def test_report_outside_a_run_prints_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_RUN", raising=False)

    report(step=3)
    report_hash(3, b"")

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text", ["{", "[1]", '{"loss": NaN, "step": "x"}', "1" * 5000])
def test_damaged_report_has_no_numbers(text: str) -> None:
    assert values_in(f"\x1eshoal-report {text}")[0] == {}


def test_lines_and_progress_bars_are_told_apart_wherever_they_are_cut() -> None:
    printed = b"one\r\n 1%|\r 2%|\r\xc3\xa4\n\n\rlast"

    for cut in range(len(printed)):
        lines = OutputLines()
        found = lines.feed(printed[:cut]) + lines.feed(printed[cut:]) + lines.end()
        bars = [each for each in found if each.endswith("\r")]
        assert [each for each in found if each not in bars] == ["one", "ä", "", "last"]
        assert [each for each in bars if "%|" in each][-1] == " 2%|\r"


def test_bar_is_shown_before_the_next_one_comes() -> None:
    """tqdm prints the carriage return first."""
    lines = OutputLines()

    assert lines.feed(b"\r 1%|") == [" 1%|\r"]
    assert lines.feed(b"\r 2%|")[-1] == " 2%|\r"
    assert lines.feed(b"\n") == [" 2%|"]


def test_line_without_an_end_is_cut() -> None:
    lines = OutputLines()

    assert [len(each) for each in lines.feed(b"x" * (2 * LINE_MAX + 1))] == [
        LINE_MAX
    ] * 2
    assert lines.end() == ["x"]
