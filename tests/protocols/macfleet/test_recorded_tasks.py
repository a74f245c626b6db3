"""Recorded frames to upstream workers, replayed to Shoal's.

Other tests cover the functions; here a connection handles the frames, and the results
are the bytes that upstream workers sent.
"""

import msgspec
import pytest

from protocols.calling import packed
from protocols.macfleet.recorded import Case, case_of, recorded
from protocols.macfleet.upstream_node import UpstreamNode, worker_with_node
from shoal.domain.vocabulary import Completed, Failed, RunJob
from shoal.domain.work import Call
from shoal.protocols.macfleet.codec.frames import encode_frame
from shoal.protocols.seam.session import Admitted

TASK_ID = "0123456789abcdef0123456789abcdef"
SUM = "taskrun/add"

ONCE = {"taskrun/two tasks same id"}
"""Of two tasks with one id the second is ignored while the first runs: upstream workers
run both, and their peers take the first result for both."""

UNREAD = {
    "taskrun/name not str": "str",
    "taskrun/timeout string": "float",
    "taskrun/missing name": "name",
}
"""Malformed tasks that get an error, and what it names.  Upstream workers send a
traceback, or stop reading."""

ENDS = {"taskrun/bad crc": "CRC32", "taskrun/unknown frame type": "frame type 77"}
"""What ends the connection.  Upstream workers keep it open, and stop reading."""

OTHER_STREAMS = {"taskrun/nonzero stream and sequence": 9}
"""Tasks on another stream than 1.  The document multiplexes by streams, so the result
goes there; upstream workers answer on stream 1."""

IGNORED = {"taskrun/not msgpack"}
"""What is not a task at all.  Upstream workers stop reading after it."""


def played(case: Case) -> UpstreamNode:
    """Let an upstream peer send the recorded frames."""
    beside = worker_with_node()
    beside.heard.clear()
    for data in case["input"]["frames_hex"]:
        beside.says(bytes.fromhex(data))
    return beside


def results(beside: UpstreamNode) -> list[dict[str, object]]:
    read = msgspec.msgpack.Decoder(dict[str, object]).decode
    return [read(each.payload) for each in beside.frames if each.type == 9]


def runs(beside: UpstreamNode) -> list[RunJob]:
    return [each for each in beside.heard if isinstance(each, RunJob)]


@recorded("task_worker")
def test_no_task_makes_a_worker_stop_reading(case: Case) -> None:
    beside = played(case)
    name = case["name"]

    if name in ENDS:
        assert ENDS[name] in beside.end
        assert not runs(beside)
        return
    assert beside.end == ""
    if name in UNREAD:
        (result,) = results(beside)[:1]
        assert result["ok"] is False
        assert UNREAD[name] in str(result["error"])
    tasks = [each for each in case["input"]["frames_hex"] if each[8:12] == "0008"]
    left_out = name in ONCE | IGNORED
    assert len(runs(beside)) + len(results(beside)) == len(tasks) - left_out
    assert bool(beside.notices) is left_out


@recorded("task_worker")
def test_results_equal_the_bytes_of_upstream_workers(case: Case) -> None:
    beside = played(case)
    replies = case["expect"]["replies"]
    wanted = [each for each in replies if "wire_hex" in each]
    heard = runs(beside)
    beside.frames.clear()

    for run, reply in zip(heard, wanted, strict=False):
        result = reply["result"]
        if result["ok"]:
            value = value_of(result["value"])
            beside.send(Completed(run.job_id, run.lease, value=packed(value)))
        else:
            beside.send(Failed(run.job_id, run.lease, result["error"]))

    if stream := OTHER_STREAMS.get(case["name"]):
        assert {each.stream for each in beside.frames} == {stream}
        beside.frames = [each._replace(stream=1) for each in beside.frames]
    sent = [encode_frame(each).hex() for each in beside.frames]
    assert sent == [each["wire_hex"] for each in wanted][: len(sent)]
    assert len(sent) == min(len(heard), len(wanted))


def value_of(tagged: object) -> object:
    """Return a value from its tagged form in the file."""
    if isinstance(tagged, dict) and "$bytes" in tagged:
        return bytes.fromhex(tagged["$bytes"])
    return tagged


def test_a_task_becomes_the_job_that_was_requested() -> None:
    beside = played(case_of(SUM))

    (run,) = runs(beside)
    assert isinstance(run.work, Call)
    assert run.job_id.startswith(TASK_ID)
    assert run.work == Call("demo.add", run.work.args, packed({}), 5.0)
    assert sum(msgspec.msgpack.decode(run.work.args)) == 42


@pytest.mark.parametrize(
    ("fields", "timeout"),
    [({}, 300.0), ({"timeout": None}, None), ({"timeout": 0}, 0.0)],
)
def test_timeouts_are_interpreted_as_upstream_workers_do(
    fields: dict[str, object], timeout: float | None
) -> None:
    beside = worker_with_node()

    run = beside.task("1", name="f", **fields)[-1]

    assert isinstance(run, RunJob)
    assert run.work == Call("f", packed([]), packed({}), timeout)


def test_a_value_that_the_peer_cannot_decode_is_an_error() -> None:
    beside = worker_with_node()
    run = beside.task("1", name="f")[-1]
    assert isinstance(run, RunJob)

    rich = packed(msgspec.msgpack.Ext(1, b"an array"))
    beside.send(Completed(run.job_id, run.lease, value=rich))

    (result,) = results(beside)
    assert (result["ok"], result["value"]) == (False, None)
    assert "MessagePack" in str(result["error"])


def test_an_upstream_server_admits_a_client_at_once() -> None:
    assert Admitted() in worker_with_node().heard
