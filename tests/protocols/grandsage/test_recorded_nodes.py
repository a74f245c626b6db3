"""The node's end against what real nodes were sent, and what became of them."""

import json

import pytest

from protocols.grandsage.recorded import CASES, MEMBER, Case, each_of_kind, query_of
from protocols.session_pair import messages_in, sent
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import AnswerChunk, CancelJob, Command, Completed, RunJob
from shoal.domain.work import Chat
from shoal.protocols.grandsage.worker import GrandSageNodeDialer, GrandSageServerSession
from shoal.protocols.seam.session import Notice, Output

# Where real nodes die, or leave the client without an answer, ours does otherwise.
WARNS = "the node dies; the document says: log a warning and do not process the task"
ENDS = "the node dies; ours ends the task, because its slot is taken until then"
RUNS = "the node dies; the task can be understood, so it is run"
ANSWERS = "the node drops the task without a word; ours lets the engine answer"

DIFFERENCES = {
    "node-vllm-bad-json": WARNS,
    "node-vllm-json-number": WARNS,
    "node-vllm-json-null": WARNS,
    "node-vllm-array": WARNS,
    "node-vllm-system-number": ENDS,
    "node-vllm-role-number": ENDS,
    "node-vllm-id-negative": WARNS,
    "node-vllm-id-2^32": WARNS,
    "node-transformers-bad-json": WARNS,
    "node-transformers-json-number": WARNS,
    "node-transformers-json-null": WARNS,
    "node-transformers-array": WARNS,
    "node-transformers-system-number": ENDS,
    "node-transformers-role-number": ENDS,
    "node-transformers-id-negative": WARNS,
    "node-transformers-id-2^32": WARNS,
    "node-vllm-seed-shaped": RUNS,  # messages that are strings: the document's example
    "node-vllm-missing-system": RUNS,
    "node-vllm-negative-max": RUNS,  # for one token, as the other node does
    "node-transformers-seed-shaped": RUNS,
    "node-transformers-missing-system": RUNS,
    "node-vllm-no-messages": ANSWERS,
    "node-vllm-long-system": ANSWERS,
    "node-transformers-long-system": ANSWERS,
}


@each_of_kind("node_behaviour")
def test_a_shoal_node_acts_as_recorded_or_better(case: Case) -> None:
    dialer = GrandSageNodeDialer("ws://127.0.0.1:8000", MEMBER)
    session = dialer.start_session({})
    opening = session.tick(0.0)
    outputs: list[Command | Output] = []
    for step in case["sends"]:
        if step.get("server_close"):
            session = dialer.start_session({})
            assert messages_in(session.tick(0.0)) == []  # what runs goes on
        elif "text" in step:
            binary = step.get("binary", False)
            text: str = step["text"]
            outputs += session.receive([text.encode() if binary else text], 0.0)

    difference = DIFFERENCES.get(case["id"])
    started = [o for o in outputs if isinstance(o, RunJob)]
    stopped = [o for o in outputs if isinstance(o, CancelJob)]
    notices = [o for o in outputs if isinstance(o, Notice)]
    assert sent(opening) == [""]
    if difference == WARNS:
        assert case["exited"]
        assert outputs == notices
        assert len(notices) == 1
    elif difference == ENDS:
        assert case["exited"]
        assert len(notices) == 1
        assert [len(frame) for frame in sent(outputs)][-1:] == [4]
    elif difference == RUNS:
        assert case["exited"]
        assert outputs == started
        assert len(started) == 1
    elif difference == ANSWERS:
        assert case["frame_count"] == 0
        assert outputs == started
        assert len(started) == 1
    else:
        assert not case["exited"]
        ids = {f"{int(job.job_id):08x}" for job in started}
        assert ids == case["text_by_id"].keys() or stopped
        assert bool(stopped) == ("stop-running" in case["id"] or "false" in case["id"])
        assert bool(notices) == ("duplicate" in case["id"])
        if not stopped:
            say_again(case.get("frames", []), session)


def say_again(frames: list[str], session: GrandSageServerSession) -> None:
    """Let our node say what the real one said: the frames must be the same bytes.

    Where the recording has no frames it has too many of them.
    """
    for frame in map(bytes.fromhex, frames):
        task_id = int.from_bytes(frame[:4])
        job_id, lease = JobId(str(task_id)), LeaseNumber(task_id)
        text = frame[4:].decode()
        event = AnswerChunk(job_id, lease, [text]) if text else Completed(job_id, lease)
        assert sent(session.send(event, 0.0)) == [frame]


@each_of_kind("node_behaviour")
def test_the_url_has_the_parameters_of_real_nodes(case: Case) -> None:
    url = GrandSageNodeDialer("ws://127.0.0.1:8000", MEMBER).url
    recorded = query_of(case["connect_url"])

    assert query_of(url) == recorded | {"model": MEMBER.model.name}


def test_the_example_in_the_document_runs() -> None:
    (send,) = CASES["node-vllm-seed-shaped"]["sends"]
    session = GrandSageNodeDialer("ws://127.0.0.1:8000", MEMBER).start_session({})

    (job,) = session.receive([send["text"]], 0.0)

    assert isinstance(job, RunJob)
    assert isinstance(job.work, Chat)
    assert job.work.messages == (
        {"role": "system", "content": "system_message"},
        {"role": "user", "content": "message1"},
        {"role": "user", "content": "message2"},
    )
    assert (job.work.max_tokens, job.work.temperature) == (100, 0.5)


def test_the_table_names_recorded_cases_that_differ() -> None:
    for name in DIFFERENCES:
        case = CASES[name]
        assert case["exited"] or case["frame_count"] == 0, name


@pytest.mark.parametrize("name", ["node-vllm-stop-running", "node-vllm-stop-false"])
def test_a_stopped_task_sends_nothing_more(name: str) -> None:
    session = GrandSageNodeDialer("ws://127.0.0.1:8000", MEMBER).start_session({})
    task, stop = [step["text"] for step in CASES[name]["sends"] if "text" in step]
    task_id = json.loads(task)["id"]
    session.receive([task], 0.0)

    (cancel,) = session.receive([stop], 0.0)

    assert cancel == CancelJob(JobId(str(task_id)), LeaseNumber(task_id))
    assert (
        list(session.send(AnswerChunk(cancel.job_id, cancel.lease, ["x"]), 0.0)) == []
    )
    assert list(session.send(Completed(cancel.job_id, cancel.lease), 0.0)) == []
