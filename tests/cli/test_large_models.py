"""What `shoal run` says of a model that several machines run."""

from typing import Any

from shoal.cli.use.run import plan_lines

PART = {"worker": "shoal:anna/*models", "name": "anna", "layers": 32, "bytes": 10**9}


def plan(**changes: Any) -> dict[str, Any]:
    fields = {"tokens_per_second": 4.0, "load_seconds": None, "why": ""}
    return {"model": "big", "needed": True, "parts": [PART], **fields, **changes}


def test_plan_says_what_is_known_of_its_speed() -> None:
    before, measured, loaded = (
        [*plan_lines(plan())],
        [*plan_lines(plan(load_seconds=41.3))],
        [*plan_lines(plan(tokens_per_second=None))],
    )

    assert before == [
        "big: 1.0 GB, split over anna (1.0 GB)",
        "  anna: 32 layers",
        "  about 4.0 tokens a second, if links are quick",
    ]
    assert measured == [
        *before,
        "  up to 41 s to send the layers, less those that are cached",
    ]
    assert loaded[-1] == "  loaded"


def test_plan_says_why_there_is_none() -> None:
    assert [*plan_lines(plan(why="none lends"))] == ["big cannot be split: none lends"]
