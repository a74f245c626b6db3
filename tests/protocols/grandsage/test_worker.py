"""The node's end: the way in, and what it makes of a server's tasks."""

import json
from dataclasses import replace

import pytest

from protocols.grandsage.recorded import MEMBER, query_of
from protocols.session_pair import messages_in, sent
from shoal.domain.errors import ConfigError, Unsupported
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.job import Privacy
from shoal.domain.outcome import Delta, Fault, Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Draining,
    Failed,
    Joined,
    Rejected,
    RunJob,
)
from shoal.domain.work import JSON, Chat, Completion, Embedding
from shoal.domain.worker import Offer, ServedModel
from shoal.protocols.grandsage.admission import read_query
from shoal.protocols.grandsage.codec import FRAME_MAX
from shoal.protocols.grandsage.worker import (
    KEEPALIVE_INTERVAL,
    GrandSageNodeDialer,
)
from shoal.protocols.seam.context import WorkerProfile, unenforceable
from shoal.protocols.seam.session import Close, Notice, Send, WorkerEnd

OURS = {"Shoal-Extensions": "shoal"}
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


def plain() -> WorkerEnd:
    return GrandSageNodeDialer("ws://host", MEMBER).start_session({})


def ours() -> WorkerEnd:
    return GrandSageNodeDialer("ws://host", MEMBER).start_session(OURS)


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
    ("code", "headers", "expected"),
    [
        (4001, {}, "does not take these parameters: why"),
        (4002, {}, "check --token"),
        (4000, OURS, "the coordinator dismissed this worker: why"),
        (4000, {}, None),
        (4008, OURS, None),
        (1006, OURS, None),
    ],
)
def test_some_closes_are_final(
    code: int, headers: dict[str, str], expected: str | None
) -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    dialer.start_session(headers)

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
def test_a_restricted_node_does_not_serve_a_plain_server(
    restricted: WorkerProfile, option: str
) -> None:
    dialer = GrandSageNodeDialer("ws://host", restricted)
    session = dialer.start_session({})

    assert list(session.tick(0.0)) == [Close(unenforceable(option))]
    assert list(session.receive([json.dumps(TASK)], 0.0)) == []
    assert dialer.final_reason(1000, "") == unenforceable(option)


def test_a_restricted_node_serves_a_shoal_coordinator() -> None:
    dialer = GrandSageNodeDialer(
        "ws://host", replace(MEMBER, only_for=frozenset({"al"}))
    )
    session = dialer.start_session(OURS)

    assert list(session.tick(0.0)) == [Send("")]
    assert given(session).job_id == JOB


def test_a_replaced_node_does_not_reconnect() -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    dialer.start_session(OURS)

    assert "choose another --name" in (dialer.final_reason(4000, "Bye") or "")


def test_a_keepalive_is_sent_at_once_and_every_ten_seconds() -> None:
    session = plain()

    assert session.tick(5.0) == [Send("")]
    assert session.deadline == 5.0 + KEEPALIVE_INTERVAL
    assert session.tick(10.0) == ()
    assert session.tick(15.0) == [Send("")]


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
    run = given(plain(), **changes)

    assert chat_of(run).max_tokens == tokens
    assert chat_of(run).temperature == 0


def test_most_fields_of_a_task_are_optional() -> None:
    text = '{"id":77,"messages":[{"role":"Boss","content":"a"},{"content":null}]}'

    (run,) = plain().receive([text], 0.0)

    assert isinstance(run, RunJob)
    assert chat_of(run).messages == (
        {"role": "user", "content": "a"},
        {"role": "user", "content": ""},
    )
    assert (chat_of(run).max_tokens, chat_of(run).temperature) == (None, None)


def test_a_lone_surrogate_from_an_original_server_is_replaced() -> None:
    text = json.dumps(TASK | {"system": "a\ud800😀"})

    (run,) = plain().receive([text], 0.0)

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

    notice, *ended = plain().receive([text], 0.0)
    (same, rejected) = ours().receive([text], 0.0)

    assert isinstance(notice, Notice)
    assert notice.text.startswith("task 77 is not processed: ")
    assert why in notice.text
    assert ended == [
        Send(b"\0\0\0M\n[The node cannot process this request.]"),
        Send(b"\0\0\0M"),
    ]
    assert same == notice
    assert isinstance(rejected, Send)
    assert json.loads(rejected.data)["id"] == 77
    assert why in json.loads(rejected.data)["rejected"]


def test_concurrent_tasks_of_a_server_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.protocols.grandsage.worker.TASKS_MAX", 20)
    session = plain()
    for task_id in range(20):
        given(session, id=task_id)

    notice, *ended = session.receive([json.dumps(TASK | {"id": 20})], 0.0)

    assert isinstance(notice, Notice)
    assert "20 tasks are running already" in notice.text
    assert sent(ended)[-1] == (20).to_bytes(4)


def test_the_extension_of_a_plain_server_is_ignored() -> None:
    shoal: dict[str, JSON] = {"temperature": 1.5, "continues": "so far"}

    assert given(plain(), shoal=shoal).continues == ""
    assert chat_of(given(plain(), shoal=shoal)).temperature == 0
    assert given(ours(), shoal=shoal).continues == "so far"
    assert chat_of(given(ours(), shoal=shoal)).temperature == 1.5
    assert chat_of(given(plain(), shoal=5)).temperature == 0


def test_after_a_reconnect_a_plain_server_receives_the_rest() -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    given(dialer.start_session({}))

    session = dialer.start_session({})

    assert messages_in(session.tick(0.0)) == []
    assert sent(session.send(AnswerChunk(JOB, LEASE, ["rest"]), 0.0)) == [
        b"\0\0\0Mrest"
    ]
    assert sent(session.send(Completed(JOB, LEASE), 0.0)) == [b"\0\0\0M"]


def test_after_a_reconnect_jobs_of_a_shoal_coordinator_are_cancelled() -> None:
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    given(dialer.start_session(OURS))

    session = dialer.start_session(OURS)

    assert session.tick(0.0) == [Send(""), CancelJob(JOB, LEASE)]
    assert session.send(AnswerChunk(JOB, LEASE, ["rest"]), 0.0) == ()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault.WORKER, b"\n[The node failed to answer.]"),
        (Fault.REQUEST, b"\n[The node cannot process this request.]"),
        (Fault.CONTEXT, b"\n[The conversation is too long for this model.]"),
    ],
)
def test_a_failed_task_of_a_plain_server_ends_with_a_short_text(
    fault: Fault, said: bytes
) -> None:
    session = plain()
    given(session)

    notice, *ended = session.send(Failed(JOB, LEASE, "out of memory", fault), 0.0)

    assert notice == Notice("task 77 failed: out of memory")
    assert ended == [Send(b"\0\0\0M" + said), Send(b"\0\0\0M")]
    assert isinstance(given(session), RunJob)


def test_only_a_plain_servers_conversations_may_be_trimmed() -> None:
    assert given(plain()).trim
    assert not given(ours()).trim


def test_a_shoal_coordinator_receives_how_a_task_ended() -> None:
    session = ours()
    for task_id in (77, 78, 79):
        given(session, id=task_id)
    second, third = JobId("78"), JobId("79")

    assert session.send(Completed(JOB, LEASE, "length", Usage(1, 2)), 0.0) == (
        Send(
            '{"id":77,"usage":{"prompt_tokens":1,"completion_tokens":2},'
            '"finish_reason":"length"}'
        ),
        Send(b"\0\0\0M"),
    )
    assert session.send(Rejected(second, LEASE, "busy"), 0.0) == (
        Send('{"id":78,"rejected":"busy"}'),
    )
    assert session.send(Failed(third, LEASE, "oom\ud800" * 999), 0.0)
    assert session.send(Draining("update"), 0.0) == (Send('{"draining":"update"}'),)
    assert session.send(Failed(third, LEASE, "again"), 0.0) == ()


def test_a_shoal_coordinator_receives_deltas() -> None:
    session = ours()
    given(session)
    delta = Delta(1, {"content": "a"}, finish_reason="length")

    assert session.send(AnswerChunk(JOB, LEASE, [delta]), 0.0) == (
        Send(
            '{"id":77,"delta":{"choice":1,"fields":{"content":"a"},'
            '"finish_reason":"length"}}'
        ),
    )


def test_a_plain_server_receives_the_text_only() -> None:
    session = plain()
    given(session)
    deltas = [
        Delta(0, {"content": "a", "tool_calls": []}),
        Delta(0, {"reasoning_content": "hm"}),
        Delta(1, {"content": "another choice"}),
        Delta(0, {"content": "b"}),
    ]

    said = [
        d for each in deltas for d in session.send(AnswerChunk(JOB, LEASE, [each]), 0)
    ]

    assert sent(said) == [b"\0\0\0Ma", b"\0\0\0Mb"]


DEEP: JSON = 1
for _ in range(99_999):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"content": "x" * FRAME_MAX}, "exceeds the limit of 1048576 bytes"),
        ({"content": "日" * (FRAME_MAX // 3)}, "exceeds the limit of 1048576 bytes"),
        ({"deep": DEEP}, "is nested too deeply"),
    ],
    ids=["long", "long in UTF-8", "deep"],
)
def test_a_piece_that_cannot_be_sent_fails_the_task(
    fields: dict[str, JSON], why: str
) -> None:
    session = ours()
    given(session)

    outputs = session.send(AnswerChunk(JOB, LEASE, [Delta(0, fields)]), 0.0)

    (text,) = sent(outputs)
    assert json.loads(text) == {"id": 77, "failed": f"a piece of the answer {why}"}
    assert session.send(AnswerChunk(JOB, LEASE, ["more"]), 0.0) == ()
    assert session.send(Completed(JOB, LEASE), 0.0) == ()


def test_a_piece_just_below_the_limit_is_sent() -> None:
    session = ours()
    given(session)
    envelope_size = len('{"id":77,"delta":{"fields":{"content":""}}}')

    delta = Delta(0, {"content": "x" * (FRAME_MAX - envelope_size - 1)})
    (text,) = sent(session.send(AnswerChunk(JOB, LEASE, [delta]), 0.0))

    assert len(text) == FRAME_MAX - 1


def test_a_shoal_coordinator_receives_the_fault() -> None:
    session = ours()
    given(session)

    failed = Failed(JOB, LEASE, "too long", Fault.CONTEXT)

    assert session.send(failed, 0.0) == (
        Send('{"id":77,"failed":"too long","fault":"context"}'),
    )


def test_other_work_than_chats_is_decoded_from_a_shoal_coordinator() -> None:
    completion: dict[str, JSON] = {
        "kind": "completion",
        "prompt": ["a"],
        "max_tokens": 3,
        "continues": "so far",
    }
    embedding: dict[str, JSON] = {"kind": "embedding", "inputs": ["a", "b"]}
    session = ours()

    first = given(session, messages=[], shoal=completion)
    second = given(session, id=78, messages=[], shoal=embedding)

    assert first.work == Completion("stub-model", ["a"], 3)
    assert first.continues == "so far"
    assert second.work == Embedding("stub-model", ("a", "b"))


def test_work_of_an_unknown_kind_is_rejected() -> None:
    text = json.dumps(TASK | {"shoal": {"kind": "painting"}})

    notice, rejected = ours().receive([text], 0.0)

    assert isinstance(notice, Notice)
    assert isinstance(rejected, Send)
    assert "Invalid enum value 'painting'" in json.loads(rejected.data)["rejected"]


def test_a_plain_server_does_not_receive_draining() -> None:
    assert plain().send(Draining("update"), 0.0) == ()


def test_a_node_joins_by_its_url() -> None:
    with pytest.raises(Unsupported):
        plain().send(Joined("n", Offer(frozenset())), 0.0)
