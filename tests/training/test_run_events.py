"""The events and notes of a run."""

import pytest

from shoal.domain.errors import PeerError
from shoal.domain.work import JSON
from shoal.training.run_events import (
    EVENTS_MAX,
    EVENTS_SIZE,
    HISTORY_MAX,
    LINE_MAX,
    LINES_MAX,
    NOTES_MAX,
    VALUES_MAX,
    RunEvents,
)

MANY = {str(number): number for number in range(VALUES_MAX + 1)}
AT = 1_700_000_000.0


def opened(*names: str) -> RunEvents:
    events = RunEvents()
    for name in names:
        assert [*events.open(name)] == [(name, {"ready": True})]
    return events


def output(*lines: str, rank: int = 0) -> dict[str, JSON]:
    return {"event": "output", "rank": rank, "lines": [*lines]}


def hashed(text: JSON, step: JSON) -> dict[str, JSON]:
    fields: dict[str, JSON] = {"hash": text, "hash_step": step}
    return {"event": "progress", "rank": 0, "values": {}, **fields}


def test_event_reaches_those_who_watch() -> None:
    events = opened("member", "watcher", "other")
    events.receive("watcher", {"watch": 0}, AT)

    sent = events.receive("member", output("hello"), AT)

    message = {"event": "output", "rank": 0, "lines": ["hello"]}
    number = int(AT * 1000)
    assert sent == [("watcher", {**message, "sequence": number, "at": AT})]


def test_watcher_continues_after_the_last_event_that_it_has_seen() -> None:
    events = opened("member", "watcher")
    for line in "abc":
        events.receive("member", output(line), AT)

    first = int(AT * 1000)
    sent = events.receive("watcher", {"watch": first}, AT)

    assert [each["lines"] for _, each in sent] == [["b"], ["c"]]
    assert [each["sequence"] for _, each in sent] == [first + 1, first + 2]


def test_numbers_grow_after_a_restart() -> None:
    before, after = opened("m"), opened("m", "w")
    for _ in range(10):
        before.receive("m", output("x"), AT)
    after.receive("w", {"watch": 0}, AT + 1)

    ((_, message),) = after.receive("m", output("y"), AT + 1)

    assert message["sequence"] == int(AT * 1000) + 1000


def test_note_reaches_all_others_also_later_ones() -> None:
    events = opened("a", "b")

    sent = events.receive("a", {"note": "master", "value": "1 h"}, AT)
    later = [*events.open("c")]

    assert sent == [("b", {"note": "master", "value": "1 h"})]
    assert later == [("c", {"note": "master", "value": "1 h"}), ("c", {"ready": True})]


def test_note_of_a_lost_member_is_withdrawn() -> None:
    events = opened("a", "b")
    events.receive("a", {"note": "master", "value": "1 h"}, AT)

    withdrawn = [*events.close("a")]

    assert withdrawn == [("b", {"note": "master", "value": None})]
    assert [*events.open("c")] == [("c", {"ready": True})]


def test_note_that_another_member_has_replaced_stays() -> None:
    events = opened("a", "b", "c")
    events.receive("a", {"note": "master", "value": "1"}, AT)
    events.receive("b", {"note": "master", "value": "2"}, AT)

    assert [*events.close("a")] == []
    assert next(iter(events.open("d"))) == ("d", {"note": "master", "value": "2"})


def test_a_run_keeps_so_many_events() -> None:
    events = opened("m", "w")
    for number in range(EVENTS_MAX + 5):
        events.receive("m", output(str(number)), AT)
    kept = events.receive("w", {"watch": 0}, AT)
    for _ in range(EVENTS_SIZE // (10 * LINE_MAX) + 5):
        events.receive("m", output(*["x" * LINE_MAX] * 10), AT)
    large = events.receive("w", {"watch": 0}, AT)

    assert len(kept) == EVENTS_MAX
    assert kept[0][1]["lines"] == ["5"]
    assert sum(len(str(each)) for _, each in large) < 2 * EVENTS_SIZE


def test_history_outlasts_output() -> None:
    events = opened("m")
    events.receive("m", {"event": "started", "rank": 3, "text": "on beagle"}, AT)
    for _ in range(EVENTS_MAX):
        events.receive("m", output("x"), AT)
    for number in range(HISTORY_MAX - 1):
        events.remark(f"generation {number}", AT)

    history = events.history
    events.remark("one more", AT)

    assert history[0].fields == {"rank": 3, "text": "on beagle"}
    assert len(events.history) == HISTORY_MAX
    assert events.history[0].fields["text"] == "generation 0"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ([], "a JSON object"),
        ({}, "unknown kind"),
        ({"event": "sabotage", "rank": 0}, "unknown kind"),
        ({"event": "output", "rank": -1, "lines": []}, "rank"),
        ({"event": "output", "rank": True, "lines": []}, "rank"),
        ({"event": "output", "rank": 0, "lines": ["x"] * (LINES_MAX + 1)}, "lines"),
        ({"event": "output", "rank": 0, "lines": [1]}, "lines"),
        ({"event": "output", "rank": 0}, "lines"),
        ({"event": "progress", "rank": 0, "values": {"loss": "low"}}, "values"),
        ({"event": "progress", "rank": 0, "values": {"loss": True}}, "values"),
        ({"event": "progress", "rank": 0, "values": MANY}, "values"),
        (hashed("", 1), "hash"),
        (hashed("a" * 65, 1), "hash"),
        (hashed("<b>", 1), "hash"),
        (hashed(5, 1), "hash"),
        (hashed("ab", -1), "hash_step"),
        (hashed("ab", 10**400), "hash_step"),
        (hashed("ab", 1.5), "hash_step"),
        ({"event": "progress", "rank": 0, "values": {"loss": 10**400}}, "values"),
        ({"event": "progress", "rank": 0, "values": {"step": -(10**400)}}, "values"),
        ({"event": "ended", "rank": 0, "text": 5}, "text"),
        ({"note": "", "value": "x"}, "note"),
        ({"note": "k", "value": None}, "note k"),
        ({"note": "k", "value": "x" * 1001}, "note k"),
        ({"watch": "all"}, "watch"),
    ],
)
def test_invalid_message_is_refused(message: object, error: str) -> None:
    with pytest.raises(PeerError, match=error):
        opened("m").receive("m", message, AT)


def test_a_run_has_so_many_notes() -> None:
    events = opened("m")
    for number in range(NOTES_MAX):
        events.receive("m", {"note": str(number), "value": ""}, AT)

    events.receive("m", {"note": "0", "value": "changed"}, AT)
    with pytest.raises(PeerError, match="notes"):
        events.receive("m", {"note": "one more", "value": ""}, AT)


def test_long_texts_are_cut() -> None:
    events = opened("m", "w")
    events.receive("w", {"watch": 0}, AT)

    ((_, line),) = events.receive("m", output("x" * 10_000), AT)
    ((_, ended),) = events.receive(
        "m", {"event": "ended", "rank": 0, "text": "x" * 10_000}, AT
    )

    assert line["lines"] == ["x" * LINE_MAX]
    assert ended["text"] == "x" * 2000
