"""Function calls in real clusters of Ray and of Dask."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from harness.speed import PATIENCE, scaled
from shoal.domain.errors import (
    ConfigError,
    InvalidRequest,
    JobError,
    NotFound,
    Unavailable,
)
from shoal.domain.work import Call, CallStream
from shoal.tasks.exception_record import decode_exception
from shoal.tasks.on_dask.caller import DaskCaller
from shoal.tasks.on_ray.caller import DRIVER, RayCaller
from shoal.tasks.process_calls import timeout_message
from shoal.tasks.values import Form, Ref, ValueReader, pack
from tasks.callers import (
    Gate,
    ProcessCaller,
    RecordedStream,
    call,
    code_call,
    ignore_progress,
    no_blobs,
)
from tasks.clusters.real import DEMO_FILE, TYPED_FILE, started_dask
from tasks.demo_tasks import Point

# Connecting takes seconds: most tests share one connection, and so its loop.
pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True)
class Cluster:
    """A cluster, and what its tests need to know."""

    kind: type[RayCaller] | type[DaskCaller]
    address: str
    option: str
    ended: str  # what is said of a call that has ended its process
    copies: int  # of a large argument, at most

    def caller(
        self, *modules: str, address: str = "", slots: int = 0, trust: bool = True
    ) -> RayCaller | DaskCaller:
        return self.kind(modules, address or self.address, slots, trust_code=trust)


@pytest.fixture(scope="module", params=["ray", "dask"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    address: str = request.getfixturevalue(f"{request.param}_cluster")
    if request.param == "ray":
        return Cluster(RayCaller, address, "--ray-address", "in the Ray cluster has", 1)
    return Cluster(DaskCaller, address, "--dask-address", "ran the call ended", 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(cluster: Cluster) -> AsyncIterator[ProcessCaller]:
    running = cluster.caller(DEMO_FILE, TYPED_FILE)
    try:
        await running.start()
        yield ProcessCaller(running)
    finally:
        await running.close()


async def test_cluster_has_a_slot_for_each_processor(caller: ProcessCaller) -> None:
    assert caller.processes.slots == 2
    assert {"demo.add", "mirror"} <= caller.processes.names


async def test_values_match_those_of_processes(caller: ProcessCaller) -> None:
    assert await caller("demo.add", 20, y=22) == 42
    mirrored = replace(call("mirror", {"x": 1, "y": 2}), exact=False)
    assert await caller.run(mirrored) == {"x": 2, "y": 1}
    with pytest.raises(InvalidRequest, match=r"tasks\.demo_tasks\.Point, which"):
        await caller("mirror", Point(1, 2))  # they import the file, as demo_tasks
    assert await caller("awaits", 4) == 4
    assert (await caller("double", np.ones(1_000_000))).sum() == 2_000_000


async def test_errors_match_those_of_processes(caller: ProcessCaller) -> None:
    with pytest.raises(JobError) as raised:
        await caller("demo.fail", "zap")
    with pytest.raises(JobError, match="SystemExit: 3"):
        await caller("quit")
    with pytest.raises(JobError, match=r"result: a value of the type object cannot"):
        await caller("demo.unserializable")
    with pytest.raises(NotFound, match=r"'demo\.nope' not registered on this"):
        await caller("demo.nope")

    record = decode_exception(raised.value.exception)
    assert record is not None
    assert (record.name, record.text) == ("ValueError", "zap")
    lines = str(raised.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "demo_tasks.py" in lines[1]
    assert lines[-1] == "ValueError: zap"


async def test_crash_fails_the_call_and_the_next_one_runs(
    caller: ProcessCaller, cluster: Cluster
) -> None:
    with pytest.raises(JobError, match=cluster.ended):
        await caller("leave", 3)

    assert await caller("demo.add", 1) == 1


async def test_timed_out_call_is_aborted(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"^Task timed out after 0\.2s$"):
        await caller("demo.sleep", 60, timeout=0.2)
    with pytest.raises(JobError, match=r"^Task timed out after 0\.05s$"):
        await caller("patient")


async def test_cancelled_call_is_aborted(caller: ProcessCaller, tmp_path: Path) -> None:
    gate = Gate.make(tmp_path)
    running = asyncio.create_task(caller("leaves_child", str(gate.begun)))
    child = psutil.Process(int(await gate.reached()))
    called_in = child.parent()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert called_in is not None
    await asyncio.to_thread(called_in.wait, PATIENCE)
    if child.is_running():
        child.kill()  # a node of Ray's may leave it


async def test_sent_function_is_called(caller: ProcessCaller) -> None:
    factor = 3

    assert await caller.run(code_call(lambda x: x * factor, 14)) == 42


async def test_trust_does_not_unpickle_other_values(caller: ProcessCaller) -> None:
    pickled = pack([object()], form=Form.EXACT_OR_PICKLED).data

    with pytest.raises(Exception, match=r"pickled.*--trust-code"):
        await caller.run(Call("demo.ident", pickled, b"\x80"))


async def test_last_progress_precedes_the_value(
    caller: ProcessCaller,
) -> None:
    reports: list[tuple[float | None, str]] = []

    await caller.processes.call(
        call("steps", 5),
        no_blobs,
        lambda share, remark: reports.append((share, remark)),
    )

    assert reports[-1] == (1.0, "done")


async def test_large_argument_is_put_into_the_cluster_once(
    caller: ProcessCaller, cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(pack(np.ones(100_000)).data)
    requested: list[bytes] = []

    async def fetch(digest: bytes) -> Path:
        requested.append(digest)
        return path

    refers = call("total", Ref(b"d" * 32))
    first = await caller.processes.call(refers, fetch, ignore_progress)
    others = await asyncio.gather(
        *(caller.processes.call(refers, fetch, ignore_progress) for _ in range(10))
    )

    assert {ValueReader().read(each) for each in (first, *others)} == {100_000.0}
    assert {*requested} == {b"d" * 32}
    assert len(requested) <= cluster.copies


async def test_missing_large_argument_is_unavailable(
    caller: ProcessCaller,
) -> None:
    with pytest.raises(Unavailable, match="no blobs here"):
        await caller("total", Ref(b"e" * 32))


async def test_stream_returns_in_order_while_the_next_call_runs(
    caller: ProcessCaller, tmp_path: Path
) -> None:
    gate = Gate.make(tmp_path)
    marks = [(str(tmp_path / str(number)),) for number in range(3)]
    calling = RecordedStream.open(caller.processes, CallStream("either"))

    calling.push(*marks, gate.args)
    returned = await calling.wait_for(3)
    await gate.reached()
    await gate.open()

    assert returned == [(0, None), (1, None), (2, None)]
    assert (await calling.wait_for(4))[3] == (3, None)
    assert calling.stream is not None
    calling.stream.close()


async def test_stream_continues_after_a_crash(
    caller: ProcessCaller, cluster: Cluster
) -> None:
    calling = RecordedStream.open(caller.processes, CallStream("crash_if"))

    calling.push(*[(number, 3) for number in range(6)])
    returned = await calling.wait_for(6)

    assert [value for _, value in returned if isinstance(value, int)] == [0, 1, 2, 4, 5]
    assert cluster.ended in dict(returned)[3]
    assert calling.stream is not None
    calling.stream.close()


async def test_stream_aborts_timed_out_and_recalled_calls(
    caller: ProcessCaller, tmp_path: Path
) -> None:
    gate = Gate.make(tmp_path)
    limit = scaled(1.0)  # seconds, in which a call that does not sleep ends
    slow = RecordedStream.open(caller.processes, CallStream("demo.sleep", limit))
    slow.push((60,), (0,))
    recalled = RecordedStream.open(caller.processes, CallStream("either"))
    assert recalled.stream is not None
    recalled.push(gate.args, (str(tmp_path / "mark"),))
    await gate.reached()
    recalled.stream.recall([0])

    assert await slow.wait_for(2) == [(0, timeout_message(limit)), (1, 0)]
    assert await recalled.wait_for(1) == [(1, None)]
    for each in (slow.stream, recalled.stream):
        assert each is not None
        each.close()


async def test_closed_streams_free_their_processors(caller: ProcessCaller) -> None:
    streams = [
        RecordedStream.open(caller.processes, CallStream("pid")) for _ in range(2)
    ]
    for each in streams:
        each.push(())
        await each.wait_for(1)
    with pytest.raises(Unavailable, match="all 2 slots are taken"):
        RecordedStream.open(caller.processes, CallStream("pid"))
    for each in streams:
        assert each.stream is not None
        each.stream.close()

    assert await caller("demo.add", 1) == 1


@asynccontextmanager
async def losable(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[RayCaller | DaskCaller, Callable[[], None]]]:
    """Connect to a cluster; gives also what ends the connection."""
    if kind == "dask":
        with started_dask(tmp_path) as (address, kill):
            running = DaskCaller([DEMO_FILE], address, 1, trust_code=False)
            await running.start()
            for module in ("batched", "client", "core"):  # with tracebacks
                log = logging.getLogger(f"distributed.{module}")
                assert not log.isEnabledFor(logging.ERROR)
            yield running, kill
            await running.close()
        return
    address = request.getfixturevalue("ray_cluster")
    others = {each.pid for each in psutil.Process().children()}
    ray = RayCaller([DEMO_FILE], address, 1, trust_code=False)
    await ray.start()

    def disconnect() -> None:
        for child in psutil.Process().children():
            if child.pid not in others and DRIVER in child.cmdline():
                child.kill()

    yield ray, disconnect
    await ray.close()


@pytest.mark.parametrize("kind", ["ray", "dask"])
async def test_lost_cluster_requeues_calls(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    gate = Gate.make(tmp_path)
    async with losable(kind, request, tmp_path) as (running, kill):
        lost = asyncio.create_task(running.wait_lost())
        calling = asyncio.create_task(
            running.call(call("waits", *gate.args), no_blobs, ignore_progress)
        )
        await gate.reached()
        kill()

        with pytest.raises(Unavailable):
            await calling
        assert "cluster has ended" in await lost
        with pytest.raises(Unavailable, match="cluster has ended"):
            await running.call(call("demo.add", 1), no_blobs, ignore_progress)


@pytest.mark.parametrize(
    ("modules", "address", "reason"),
    [
        (["nothing_of_this_name"], "", "nothing_of_this_name: no such module"),
        (["nowhere/sums.py"], "", r"nowhere/sums\.py: no such file"),
        ([], "127.0.0.1:1", "OPTION 127.0.0.1:1.*cannot be used"),
        ([], "rubbish", "OPTION rubbish.*cannot be used"),
    ],
)
async def test_unusable_configuration_is_explained(
    cluster: Cluster, modules: list[str], address: str, reason: str
) -> None:
    running = cluster.caller(*modules, address=address)

    with pytest.raises(ConfigError, match=reason.replace("OPTION", cluster.option)):
        await running.start()

    await running.close()


async def test_missing_ray_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])  # where it would be found
    ray = RayCaller([], "auto", 0, trust_code=True)

    with pytest.raises(ConfigError, match=r"Ray is not installed: .*install .*\[ray\]"):
        await ray.start()
