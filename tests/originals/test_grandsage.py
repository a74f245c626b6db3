"""Our sessions with the imitations of GrandSage's original programs."""

from collections.abc import Sequence

from msgspec.structs import replace

from originals.grandsage import OriginalServer, VllmNode
from protocols.grandsage.recorded import MEMBER, NOW, joined, run
from protocols.pairs import CHAT
from protocols.session_pair import sent
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    Event,
    Failed,
    RunJob,
)
from shoal.domain.work import Chat
from shoal.protocols.grandsage.worker import (
    BROKEN,
    REPEAT_WITHIN,
    GrandSageNodeDialer,
)
from shoal.protocols.seam.session import Close, Output, Send, WorkerEnd

HELLO = [{"role": "user", "content": "hello"}]


def give(server: OriginalServer, session: WorkerEnd) -> RunJob:
    """Give our node a task of the server."""
    _, text = server.submit(HELLO)
    (run,) = session.receive([text], 0.0)
    assert isinstance(run, RunJob)
    return run


def deliver(server: OriginalServer, outputs: Sequence[Command | Output]) -> list[str]:
    """Deliver our node's frames; return the texts of the server."""
    return [text for frame in sent(outputs) for text in server.receive(frame)]


def test_failing_tasks_leave_a_servers_slots_free_and_the_node_connected() -> None:
    server = OriginalServer(slots=4)
    session = GrandSageNodeDialer("ws://host", MEMBER).start_session({})

    for _ in range(5):
        run = give(server, session)
        failed = Failed(run.job_id, run.lease, "10.0.0.1: no GPU", Fault.WORKER)
        outputs = session.send(failed, 0.0)
        assert not any(isinstance(each, Close) for each in outputs)
        deliver(server, outputs)

    assert server.taken == 0
    texts = {task.text for task in server.tasks.values()}
    assert texts == {"\n[The node failed to answer.]"}


def test_a_failed_task_that_a_server_sends_again_ends_again() -> None:
    server = OriginalServer()
    session = GrandSageNodeDialer("ws://host", MEMBER).start_session({})
    _, text = server.submit(HELLO)

    for _ in range(3):
        (run,) = session.receive([text], 0.0)
        assert isinstance(run, RunJob)
        outputs = session.send(Failed(run.job_id, run.lease, "no GPU"), 0.0)
        assert not any(isinstance(each, Close) for each in outputs)
        assert outputs[-1] == Send((1_000).to_bytes(4))


def test_a_task_that_fails_between_two_connections_ends_on_the_second() -> None:
    server = OriginalServer()
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    run = give(server, dialer.start_session({}))

    session = dialer.start_session({})
    deliver(server, session.tick(0.0))
    deliver(server, session.send(Failed(run.job_id, run.lease, "oom"), 0.0))

    assert server.taken == 0


def test_an_end_frame_that_was_lost_is_repeated_on_the_next_connection() -> None:
    server = OriginalServer()
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    session = dialer.start_session({})
    run = give(server, session)
    deliver(server, session.send(AnswerChunk(run.job_id, run.lease, ["hi"]), 1.0))
    session.send(Completed(run.job_id, run.lease), 2.0)  # lost with the connection

    replies = deliver(server, dialer.start_session({}).tick(3.0))

    assert replies == []
    assert server.taken == 0
    assert server.tasks[1_000].text == "hi" + BROKEN  # more may have been lost


def test_no_text_that_a_connection_lost_is_missing_unnoticed() -> None:
    def answered(lost: Sequence[int]) -> str:
        """Return the client's text; frames of these events are lost with the first."""
        server = OriginalServer()
        dialer = GrandSageNodeDialer("ws://host", MEMBER)
        session = dialer.start_session({})
        run = give(server, session)
        job = run.job_id, run.lease
        events: list[Event] = [AnswerChunk(*job, [each]) for each in ("one ", "two")]
        broken = False
        for number, event in enumerate([*events, Completed(*job)]):
            if number not in lost and broken:
                session, broken = dialer.start_session({}), False
                deliver(server, session.tick(float(number)))
            outputs = session.send(event, float(number))
            if number in lost:
                broken = True
            else:
                deliver(server, outputs)
        if broken:
            deliver(server, dialer.start_session({}).tick(3.0))
        assert server.taken == 0
        return server.tasks[1_000].text

    assert answered([]) == "one two"
    for lost in ([0], [0, 1], [1], [1, 2], [2], [0, 1, 2]):
        assert answered(lost).endswith(BROKEN)


def test_a_task_whose_text_may_be_lost_is_cancelled_and_its_end_repeated() -> None:
    server = OriginalServer(slots=2)
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    session = dialer.start_session({})
    begun, other = give(server, session), give(server, session)
    session.send(AnswerChunk(begun.job_id, begun.lease, ["lost"]), 1.0)

    second, third = dialer.start_session({}), dialer.start_session({})
    outputs = second.tick(2.0)  # lost as well
    deliver(server, third.tick(3.0))
    deliver(server, third.send(AnswerChunk(other.job_id, other.lease, ["hi"]), 4.0))
    deliver(server, third.send(Completed(other.job_id, other.lease), 4.0))

    cancelled = [each for each in outputs if isinstance(each, CancelJob)]
    assert [each.job_id for each in cancelled] == [begun.job_id]
    assert third.send(Completed(begun.job_id, begun.lease), 5.0) == ()
    assert [task.text for task in server.tasks.values()] == [BROKEN, "hi"]
    assert server.taken == 0


def test_a_vllm_node_runs_a_job_with_a_limit_as_large_as_its_context() -> None:
    node, session = VllmNode(), joined()

    (text,) = sent(session.send(run(replace(CHAT, max_tokens=4096)), NOW))
    node.receive(str(text))

    assert node.dropped == []
    assert isinstance(session.receive([*node.finish()], NOW)[-1], Completed)


def test_a_task_that_a_vllm_node_dropped_frees_its_slot() -> None:
    node, session = VllmNode(answer="word " * 10, context=2048), joined()
    system = {"role": "system", "content": "word " * 2000}
    question = {"role": "user", "content": "hi"}
    for number in range(4):
        chat = Chat("m1", (system, question) if number == 0 else (question,), 100)
        (text,) = sent(session.send(run(chat, str(number)), NOW))
        node.receive(str(text))

    outputs = session.receive([*node.finish()], NOW)

    assert len(node.dropped) == 1
    (failed,) = [each for each in outputs if isinstance(each, Failed)]
    assert (failed.job_id, failed.fault) == ("0", Fault.CONTEXT)


def test_end_frames_are_repeated_once_and_only_recent_ones() -> None:
    server = OriginalServer()
    dialer = GrandSageNodeDialer("ws://host", MEMBER)
    session = dialer.start_session({})
    run = give(server, session)
    session.send(Completed(run.job_id, run.lease), 2.0)

    late = dialer.start_session({}).tick(2.1 + REPEAT_WITHIN)
    later = dialer.start_session({}).tick(2.2)

    assert sent(late) == [""]
    assert sent(later) == [""]
