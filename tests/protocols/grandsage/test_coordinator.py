"""The coordinator's end of a connection."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from harness.steps import calls
from protocols.contexts import protocol_context
from protocols.grandsage.recorded import NODE, NOW, accept, joined, run
from protocols.pairs import CHAT, as_worker
from protocols.session_pair import sent
from shoal.domain.errors import Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    Dismiss,
    Failed,
    Joined,
    Rejected,
    RunJob,
)
from shoal.domain.work import JSON, Chat, Completion, Embedding, Feature
from shoal.protocols.grandsage import Config, endpoints
from shoal.protocols.grandsage.codec import TEMPERATURE
from shoal.protocols.grandsage.coordinator import (
    DROPPED,
    STOP_INTERVAL,
    TASK_ID_COUNT,
    TaskIds,
)
from shoal.protocols.seam.endpoints import UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.session import Close, CoordinatorEnd, Notice, Send

JOB = JobId("job")
LEASE = LeaseNumber(1)


def task(session: CoordinatorEnd, command: Command) -> dict[str, Any]:
    (text,) = sent(session.send(command, NOW))
    decoded: dict[str, Any] = json.loads(text)
    return decoded


def frame(task_id: int, text: str = "") -> bytes:
    return task_id.to_bytes(4) + text.encode()


def test_leading_system_messages_become_the_system_text() -> None:
    messages: tuple[dict[str, JSON], ...] = (
        {"role": "system", "content": "one"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
        {"role": "system", "content": "three"},
        {"content": None},
    )

    sent_task = task(joined(), run(Chat("m1", messages)))

    assert sent_task["system"] == "one\n\ntwo"
    assert sent_task["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "three"},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("wanted", "written"),
    [
        (None, str(TEMPERATURE)), (0.0, "0"), (1.0, "1"), (1, "1"), (0.25, "0.25"),
        (-1.0, "0"), (1e-9, "0"), (5.0, "2"), (float("nan"), "0.7"),
        (float("inf"), "2"), (float("-inf"), "0"),
    ],
)  # fmt: skip
def test_no_temperature_crashes_a_node(wanted: float | None, written: str) -> None:
    (text,) = sent(joined().send(run(replace(CHAT, temperature=wanted)), NOW))

    assert f'"temperature":{written},' in str(text)


@pytest.mark.parametrize(
    ("wanted", "written"),
    [(None, 1024), (1, 1), (0, 1), (-5, 1), (4096, 1024), (10**30, 1024)],
)
def test_no_token_limit_is_too_small_or_too_large_for_a_node(
    wanted: int | None, written: int
) -> None:
    sent_task = task(joined(), run(replace(CHAT, max_tokens=wanted)))

    assert sent_task["max_new_tokens"] == written


@pytest.mark.parametrize(
    ("context", "wanted", "written"),
    [
        (8192, None, 1024),
        (8192, 4096, 4096),
        (8192, 8192, 8192 - 50 - 8),  # what the question leaves
        (512, None, 454),
        (32, 100, 8),  # a quarter: the node drops the oldest messages
        (2**31 - 1, 10**30, 2**31 - 1 - 50 - 8),
    ],
)
def test_a_known_context_limits_the_answer(
    context: int, wanted: int | None, written: int
) -> None:
    (endpoint,) = endpoints(Config(context=(f"m1={context}",)), protocol_context())
    query = NODE.partition("?")[2]
    session = as_worker(endpoint.accept(UpgradeRequest("/ws", query), 0.0)).session

    sent_task = task(session, run(replace(CHAT, max_tokens=wanted)))

    assert sent_task["max_new_tokens"] == written


def test_a_task_that_a_node_passed_over_is_too_long_for_it() -> None:
    session = joined()
    silent = task(session, run(CHAT, "silent"))["id"]
    answered = task(session, run(CHAT, "answered"))["id"]
    text = frame(answered, "word " * 7)

    begun = session.receive([text, ""], NOW)
    more = session.receive([text, text[:-1]], NOW)
    ended = session.receive([frame(answered)], NOW)

    chunks = [each for each in (*begun, *more) if not isinstance(each, AnswerChunk)]
    assert chunks == []
    done, stop, failed = ended
    assert done == Completed(JobId("answered"), LEASE)
    assert stop == Send(f'{{"id":{silent},"stop":true}}')
    assert failed == Failed(JobId("silent"), LEASE, DROPPED, Fault.CONTEXT)
    assert session.receive([frame(silent)], NOW) == ()


def test_a_task_that_is_merely_slow_is_kept() -> None:
    session = joined()
    earlier = task(session, run(CHAT, "earlier"))["id"]
    silent = task(session, run(CHAT, "silent"))["id"]
    begun = task(session, run(CHAT, "begun"))["id"]
    short = task(session, run(CHAT, "short"))["id"]
    long_text = "word " * 100

    outputs = session.receive(
        [
            *(frame(earlier, long_text), frame(earlier)),  # issued before
            frame(begun, long_text),  # not answered yet
            *(frame(short, "Yes."), frame(short)),  # one step of the node
            *(frame(silent, "at last"), frame(begun)),
        ],
        NOW,
    )

    assert not any(isinstance(each, Rejected | Failed) for each in outputs)


def test_lone_surrogates_in_a_task_are_replaced() -> None:
    chat = Chat("m1", ({"role": "user", "content": "a\ud800b"},))

    assert task(joined(), run(chat))["messages"][0]["content"] == "a\ufffdb"


@pytest.mark.parametrize(
    "job",
    [
        run(Completion("m1", "a")),
        run(Embedding("m1", ("a",))),
        replace(run(CHAT), continues="so far"),
    ],
)
def test_a_node_gets_chats_from_the_start_only(job: RunJob) -> None:
    with pytest.raises(Unsupported):
        joined().send(job, NOW)


def test_options_are_not_sent() -> None:
    chat = replace(CHAT, options={"top_p": 0.5})

    assert task(joined(), run(chat)).keys() == task(joined(), run(CHAT)).keys()


def test_frames_that_come_together_take_as_many_calls_however_many() -> None:
    def receive(frames: int) -> int:
        session = joined()
        task(session, run(CHAT, "silent"))  # so that characters are counted
        data = frame(task(session, run(CHAT))["id"], "é")
        return calls(lambda: session.receive([data] * frames, NOW))

    assert receive(10) == receive(99)


def test_text_of_a_node_is_ignored() -> None:
    session = joined()
    task_id = task(session, run(CHAT))["id"]

    (notice,) = session.receive([f'{{"id":{task_id},"failed":"x"}}'], NOW)

    assert isinstance(notice, Notice)


def test_ids_continue_across_connections_and_wrap() -> None:
    task_ids = TaskIds((TASK_ID_COUNT * 3 - 2) / 1000)

    used: list[set[int]] = [set(), set(), {0, 1}, set(), set()]
    ids = [task_ids.next_id(each, now=0.0) for each in used]

    assert ids == [TASK_ID_COUNT - 2, TASK_ID_COUNT - 1, 2, 3, 4]


def test_ids_begin_at_the_time_of_the_first_task() -> None:
    first, later = TaskIds(1.0), TaskIds(1.0)

    assert first.next_id((), now=5.0) == 6000
    assert first.next_id((), now=9.0) == 6001
    assert later.next_id((), now=9.0) == 10_000


def test_two_nodes_never_have_the_same_task_id() -> None:
    (endpoint,) = endpoints(Config(), protocol_context())
    path, _, query = NODE.partition("?")
    one, other = (
        as_worker(endpoint.accept(UpgradeRequest(path, query), 0.0)).session
        for _ in range(2)
    )

    first_id = task(one, run(CHAT))["id"]
    assert task(other, run(CHAT))["id"] == first_id + 1


def test_created_at_is_in_seconds_since_the_epoch() -> None:
    task_ids = TaskIds(1_700_000_000.9)

    assert [task_ids.created_at(now) for now in (0.0, 0.2, 10.0)] == [
        1_700_000_000,
        1_700_000_001,
        1_700_000_010,
    ]


def test_created_at_is_when_the_job_was_submitted() -> None:
    session = joined()
    at_once = task(session, run(CHAT, "at once"))
    waited = task(session, replace(run(CHAT, "waited"), waited=25.0))

    assert at_once["created_at"] - waited["created_at"] == 25


def test_the_end_of_an_unknown_task_is_warned_of() -> None:
    session = joined()
    task_id = task(session, run(CHAT))["id"]

    first = session.receive([frame(5), frame(task_id), frame(task_id)], NOW)

    assert first == (
        Notice("end of task 5, which is not running: ignored"),
        Completed(JOB, LEASE),
        Notice(f"end of task {task_id}, which is not running: ignored"),
    )


def test_a_node_without_keepalives_may_be_silent() -> None:
    session = accept().session
    session.tick(5.0)

    session.receive([frame(5), frame(5, "late")], 10.0)

    assert session.deadline is None
    assert session.tick(1000.0) == ()


def test_the_route_of_nodes_asks_for_pongs() -> None:
    (route,) = endpoints(Config(silence=20.0), protocol_context())

    assert isinstance(route, WebSocketRoute)
    assert route.idle_max == 60.0


def test_a_silent_node_is_disconnected_at_the_deadline() -> None:
    session = accept().session
    session.tick(5.0)
    session.receive([""], 10.0)
    assert session.deadline == 40.0

    session.receive([frame(5)], 20.0)

    assert session.deadline == 50.0
    assert session.tick(49.9) == ()
    assert session.tick(50.0) == (Close("silent for 30 s", 4008, "Silent"),)


def test_a_dismissed_node_is_closed_with_bye() -> None:
    replaced, removed = Dismiss("replaced", replaced=True), Dismiss("removed")

    assert joined().send(replaced, NOW) == (Close("replaced", 4000, "Bye"),)
    assert joined().send(removed, NOW) == (Close("removed", 4000, "removed"),)


def test_a_cancelled_task_is_stopped_once_while_its_text_is_in_transit() -> None:
    session = joined()
    task_id = task(session, run(CHAT))["id"]
    stop = Send(f'{{"id":{task_id},"stop":true}}')

    assert session.send(CancelJob(JOB, LEASE), 10.0) == (stop,)

    assert session.receive([frame(task_id, "late")], 10.5) == ()
    stopped_again = session.receive([frame(task_id, "later")], 10.0 + STOP_INTERVAL)
    assert stopped_again[0] == stop
    assert isinstance(stopped_again[1], Notice)
    assert session.receive([frame(task_id)], 20.0) == ()


def test_an_unfinished_character_ends_as_one_replacement() -> None:
    session = joined()
    task_id = task(session, run(CHAT))["id"]

    assert session.receive([frame(task_id) + b"a\xe6"], NOW) == (
        AnswerChunk(JOB, LEASE, ["a"]),
    )
    assert session.receive([frame(task_id) + b"\x97"], NOW) == ()
    assert session.receive([frame(task_id)], NOW) == (
        AnswerChunk(JOB, LEASE, ["\ufffd"]),
        Completed(JOB, LEASE),
    )


def test_text_of_a_node_is_logged_truncated() -> None:
    (notice,) = joined().receive(["\n日" * 500], NOW)

    assert isinstance(notice, Notice)
    assert notice.text.isascii()
    assert len(notice.text) < 120


def test_a_node_accepts_runs_and_stops_only() -> None:
    session = accept().session

    (event,) = session.tick(0.0)

    assert isinstance(event, Joined)
    assert event.offer.features == frozenset[Feature]()
    assert session.accepts == {RunJob, CancelJob, Dismiss}
