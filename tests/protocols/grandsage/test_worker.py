"""The node's end: the way in, and what it makes of a server's tasks."""

import json
from dataclasses import replace

import pytest

from protocols.grandsage.recorded import MEMBER, query_of
from protocols.session_pair import messages_in, sent
from shoal.domain.errors import ConfigError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Privacy
from shoal.domain.outcome import Delta, Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    Completed,
    Draining,
    Failed,
    Joined,
    RunJob,
)
from shoal.domain.work import JSON, Chat
from shoal.domain.worker import Offer, ServedModel
from shoal.protocols.grandsage.admission import read_query
from shoal.protocols.grandsage.worker import (
    KEEPALIVE_INTERVAL,
    GrandSageNodeDialer,
)
from shoal.protocols.seam.context import WorkerProfile, unenforceable
from shoal.protocols.seam.session import Close, Notice, Send, WorkerEnd

JOB = JobId("77")
LEASE = LeaseNumber(77)
TASK: dict[str, JSON] = {
    "state": 0,
    "id": 77,
    "system": "S",
    "messages": [{"role": "user", "content": "hi"}],
    "max_new_tokens": 6,
    "temperature": 0,
}


def connected() -> WorkerEnd:
    return GrandSageNodeDialer("ws://host", MEMBER).start_session({})


def given(session: WorkerEnd, **changes: JSON) -> RunJob:
    (run,) = session.receive([json.dumps(TASK | changes)], 0.0)
    assert isinstance(run, RunJob)
    return run


def chat_of(run: RunJob) -> Chat:
    assert isinstance(run.work, Chat)
    return run.work


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("ws://host:3000", "ws://host:3000/ws"),
        ("ws://host:3000/", "ws://host:3000/ws"),
        ("ws://host/deep/path", "ws://host/deep/path"),
        ("http://host:3000", "ws://host:3000/ws"),
        ("https://host", "wss://host/ws"),
        ("WSS://[::1]:5/ws", "wss://[::1]:5/ws"),
        ("ws://user:word@host/ws#part", "ws://user:word@host/ws"),
    ],
)
def test_addresses_are_completed(url: str, address: str) -> None:
    dialled = GrandSageNodeDialer(url, MEMBER).url

    assert dialled.partition("?")[0] == address
    assert query_of(dialled) == {
        "token": "nt",
        "model": "stub-model",
        "max_concurrency": "3",
        "name": "nn",
    }


def test_unusual_names_arrive_unchanged() -> None:
    member = replace(
        MEMBER, name="a b/c?d&e=f+g%h日\ud800", model=ServedModel("x/y:7b#z")
    )

    url = GrandSageNodeDialer("ws://host", member).url

    assert url.isascii()
    assert url.count("?") == 1
    query = read_query(url.partition("?")[2])
    assert query["name"] == "a b/c?d&e=f+g%h日?"
    assert query["model"] == "x/y:7b#z"


def test_the_profiles_token_takes_precedence_over_the_urls() -> None:
    url = "ws://host/ws?token=pasted&name=other&extra=1"
    extended = replace(MEMBER, token="")

    def token(url: str, member: object) -> dict[str, str]:
        assert isinstance(member, type(MEMBER))
        return read_query(GrandSageNodeDialer(url, member).url.partition("?")[2])

    assert token(url, extended)["token"] == "pasted"
    assert token(url, extended)["name"] == "nn"
    assert token(url, extended)["extra"] == "1"
    assert token(url, MEMBER)["token"] == "nt"
    assert token("ws://host", extended)["token"] == "-"


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("host:3000", "unknown scheme 'host'"),
        ("ftp://host", "unknown scheme 'ftp'"),
        ("ws://ho st", "a space or control character in it"),
        ("ws://", "no host"),
        ("ws://:3000", "no host"),
        ("ws://host:port", "Port could not be cast"),
        ("ws://host:99999", "Port out of range"),
    ],
)
def test_an_invalid_address_is_refused(url: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        GrandSageNodeDialer(url, MEMBER)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (4001, "does not take these parameters: why"),
        (4002, "check --token"),
        (4000, None),
        (4008, None),
        (1006, None),
    ],
)
def test_some_closes_are_final(code: int, expected: str | None) -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    dialer.start_session({})

    reason = dialer.final_reason(code, "why")

    assert (reason is None) == (expected is None)
    assert expected is None or expected in str(reason)


@pytest.mark.parametrize(
    ("restricted", "option"),
    [
        (replace(MEMBER, only_for=frozenset({"al"})), "--only-for"),
        (replace(MEMBER, privacy=Privacy.PUBLIC), "--privacy"),
    ],
)
def test_a_restricted_node_serves_no_server(
    restricted: WorkerProfile, option: str
) -> None:
    dialer = GrandSageNodeDialer("ws://host", restricted)
    session = dialer.start_session({})

    assert list(session.tick(0.0)) == [Close(unenforceable(option))]
    assert list(session.receive([json.dumps(TASK)], 0.0)) == []
    assert dialer.final_reason(1000, "") == unenforceable(option)


def test_a_keepalive_is_sent_at_once_and_every_ten_seconds() -> None:
    session = connected()

    assert session.tick(5.0) == (Send(""),)
    assert session.deadline == 5.0 + KEEPALIVE_INTERVAL
    assert session.tick(10.0) == ()
    assert session.tick(15.0) == (Send(""),)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        *(({}, 6), ({"max_new_tokens": None}, None), ({"max_new_tokens": -5}, 1)),
        *(({"max_new_tokens": 7.9}, 7), ({"max_new_tokens": 0.5}, 1)),
    ],
)
def test_limits_are_those_of_the_task(
    changes: dict[str, JSON], tokens: int | None
) -> None:
    run = given(connected(), **changes)

    assert chat_of(run).max_tokens == tokens
    assert chat_of(run).temperature == 0


def test_most_fields_of_a_task_are_optional() -> None:
    text = '{"id":77,"messages":[{"role":"Boss","content":"a"},{"content":null}]}'

    (run,) = connected().receive([text], 0.0)

    assert isinstance(run, RunJob)
    assert chat_of(run).messages == (
        {"role": "user", "content": "a"},
        {"role": "user", "content": ""},
    )
    assert (chat_of(run).max_tokens, chat_of(run).temperature) == (None, None)


def test_a_lone_surrogate_from_an_original_server_is_replaced() -> None:
    text = json.dumps(TASK | {"system": "a\ud800😀"})

    (run,) = connected().receive([text], 0.0)

    assert isinstance(run, RunJob)
    assert chat_of(run).messages[0]["content"] == "a\ufffd😀"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"state": 1}, "not in a pending state"),
        ({"state": False}, "not in a pending state"),
        ({"messages": None}, "Expected `array`, got `null`"),
        ({"messages": [5]}, "Expected `str | object`, got `int`"),
        ({"temperature": "hot"}, "Expected `float | null`, got `str`"),
        ({"max_new_tokens": "1"}, "Expected `int | float | null`, got `str`"),
    ],
)
def test_a_malformed_task_is_logged_and_ended(
    change: dict[str, JSON], why: str
) -> None:
    text = json.dumps(TASK | change)

    notice, *ended = connected().receive([text], 0.0)

    assert isinstance(notice, Notice)
    assert notice.text.startswith("task 77 is not processed: ")
    assert why in notice.text
    assert ended == [
        Send(b"\0\0\0M\n[The node cannot process this request.]"),
        Send(b"\0\0\0M"),
    ]


def test_concurrent_tasks_of_a_server_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.grandsage.worker.TASKS_MAX", 20)
    session = connected()
    for task_id in range(20):
        given(session, id=task_id)

    notice, *ended = session.receive([json.dumps(TASK | {"id": 20})], 0.0)

    assert isinstance(notice, Notice)
    assert "20 tasks are running already" in notice.text
    assert sent(ended)[-1] == (20).to_bytes(4)


def test_after_a_reconnect_a_server_receives_the_rest() -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    given(dialer.start_session({}))

    session = dialer.start_session({})

    assert messages_in(session.tick(0.0)) == []
    assert sent(session.send(AnswerChunk(JOB, LEASE, ["rest"]), 0.0)) == [
        b"\0\0\0Mrest"
    ]
    assert sent(session.send(Completed(JOB, LEASE), 0.0)) == [b"\0\0\0M"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.WORKER, b"\n[The node failed to answer.]"),
        (Fault.REQUEST, b"\n[The node cannot process this request.]"),
        (Fault.CONTEXT, b"\n[The conversation is too long for this model.]"),
    ],
)
def test_a_failed_task_ends_with_a_short_text(fault: Fault, said: bytes) -> None:
    session = connected()
    given(session)

    notice, *ended = session.send(Failed(JOB, LEASE, "out of memory", fault), 0.0)

    assert notice == Notice("task 77 failed: out of memory")
    assert ended == [Send(b"\0\0\0M" + said), Send(b"\0\0\0M")]
    assert isinstance(given(session), RunJob)


def test_conversations_may_be_trimmed() -> None:
    assert given(connected()).trim


def test_a_server_receives_the_text_only() -> None:
    session = connected()
    given(session)
    deltas = [
        Delta(0, {"content": "a", "tool_calls": []}),
        Delta(0, {"reasoning_content": "hm"}),
        Delta(1, {"content": "another choice"}),
        Delta(0, {"content": "b"}),
        Delta(0, {"refusal": "no"}),
    ]

    said = [
        d for each in deltas for d in session.send(AnswerChunk(JOB, LEASE, [each]), 0)
    ]

    assert sent(said) == [b"\0\0\0Ma", b"\0\0\0Mb", b"\0\0\0Mno"]


def test_a_node_joins_by_its_url_and_leaves_by_disconnecting() -> None:
    for event in (Joined("n", Offer(frozenset())), Draining("update")):
        assert type(event) not in connected().accepts
        with pytest.raises(Unsupported):
            connected().send(event, 0.0)
