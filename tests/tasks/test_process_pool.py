"""Function calls in real processes, which are killed and replaced."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from shoal.domain.errors import (
    ConfigError,
    InvalidRequest,
    JobError,
    NotFound,
    Unavailable,
)
from shoal.domain.work import Call
from shoal.tasks.exception_record import decode_exception
from shoal.tasks.process import ChildProcess
from shoal.tasks.process_pool import ProcessPool
from shoal.tasks.registry import PYTHON
from shoal.tasks.values import Form, Ref, ValueReader, pack
from tasks.callers import (
    DEMO,
    TYPED,
    Gate,
    ProcessCaller,
    call,
    caller_of,
    code_call,
    ignore_progress,
    no_blobs,
)
from tasks.demo_tasks import Point

# Most tests share processes, and so their loop: a process that ends is replaced.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller() -> AsyncIterator[ProcessCaller]:
    async with caller_of() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def typed() -> AsyncIterator[ProcessCaller]:
    """A process that has the functions of arrays and models, too."""
    async with caller_of(DEMO, TYPED) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trusting() -> AsyncIterator[ProcessCaller]:
    """A process that runs functions that are sent as code."""
    async with caller_of(trust_code=True) as running:
        yield running


async def test_value_is_returned(caller: ProcessCaller) -> None:
    assert await caller("demo.add", 20, 22) == 42
    assert await caller("demo.add", 1, y=5) == 6
    assert await caller("awaits", 4) == 4


async def test_names_are_the_modules_tasks(caller: ProcessCaller) -> None:
    assert {"demo.add", "mirror"} <= caller.processes.names


async def test_exception_has_a_record_and_a_traceback_from_the_function_on(
    caller: ProcessCaller,
) -> None:
    with pytest.raises(JobError) as raised:
        await caller("demo.fail", "zap")

    record = decode_exception(raised.value.exception)
    assert record is not None
    assert (record.name, record.text) == ("ValueError", "zap")
    lines = str(raised.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "demo_tasks.py" in lines[1]
    assert lines[-1] == "ValueError: zap"
    assert "running.py" not in str(raised.value)


async def test_system_exit_fails_only_the_call(caller: ProcessCaller) -> None:
    pid = await caller("pid")
    with pytest.raises(JobError, match="SystemExit: 3"):
        await caller("quit")

    assert await caller("pid") == pid


async def test_error_names_an_unsupported_result(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"result: a value of the type object cannot"):
        await caller("demo.unserializable")


async def test_unknown_name_error_lists_known_names(caller: ProcessCaller) -> None:
    with pytest.raises(NotFound) as raised:
        await caller("demo.nope")

    text = str(raised.value)
    assert "TaskNotRegisteredError: Task 'demo.nope' not registered on this" in text
    assert "Known tasks: ['adds', 'awaits'" in text


async def test_arguments_other_than_a_list_are_rejected(caller: ProcessCaller) -> None:
    with pytest.raises(InvalidRequest, match="neither a list nor a map"):
        await caller.run(Call("demo.add", b"\x01", b"\x80"))
    with pytest.raises(InvalidRequest, match="not valid MessagePack"):
        await caller.run(Call("demo.add", b"\xc1", b"\x80"))


async def test_timed_out_call_is_killed_and_the_next_one_runs(
    caller: ProcessCaller,
) -> None:
    pid = await caller("pid")
    with pytest.raises(JobError, match=r"^Task timed out after 0\.2s$"):
        await caller("demo.sleep", 60, timeout=0.2)

    assert await caller("pid") != pid
    assert not psutil.pid_exists(pid)


async def test_task_has_a_default_timeout(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"^Task timed out after 0\.05s$"):
        await caller("patient")


async def test_zero_timeout_times_out(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"^Task timed out after 0s$"):
        await caller("demo.add", 1, timeout=0)


async def test_cancelled_call_is_killed_with_its_children(
    caller: ProcessCaller, gate: Gate
) -> None:
    running = asyncio.create_task(caller("leaves_child", str(gate.begun)))
    text = await gate.reached()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert await caller("demo.add", 1) == 1
    child = int(text)
    exited = not psutil.pid_exists(child)
    assert exited or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_crash_error_names_signal_and_location(caller: ProcessCaller) -> None:
    with pytest.raises(JobError) as raised:
        await caller("crash")

    assert "was ended by SIGSEGV; its last output:" in str(raised.value)
    assert "in crash" in str(raised.value)
    assert "runpy" not in str(raised.value)
    assert await caller("demo.add", 1) == 1


async def test_exit_error_has_status_and_last_output(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"with status 3; its last output:\nso long$"):
        await caller("leave", 3)


async def test_crash_error_quotes_only_the_calls_own_output(
    caller: ProcessCaller,
) -> None:
    await caller("prints", "the secret of another")
    await caller("speaks", "and a part of a line")
    with pytest.raises(JobError) as raised:
        await caller("speaks", "mine", 4)

    assert str(raised.value).endswith("with status 4; its last output:\nmine")


async def test_printing_does_not_corrupt_messages(
    caller: ProcessCaller,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert await caller("prints", "Hello!") == "Hello!"
    assert await caller("prints", "again") == "again"

    assert "Hello!" in capfd.readouterr().err


async def test_progress_is_reported_during_a_call(caller: ProcessCaller) -> None:
    reports: list[tuple[float | None, str]] = []
    await caller.processes.call(
        call("steps", 5),
        no_blobs,
        lambda share, remark: reports.append((share, remark)),
    )

    assert reports[0] == (0.0, "step 0")
    assert reports[-1] == (1.0, "done")


async def test_excess_calls_wait_for_a_slot() -> None:
    async with caller_of(slots=2) as caller:
        pids = await asyncio.gather(*(caller("pid") for _ in range(20)))

    assert len(set(pids)) <= 2


def wait_ended(pid: int) -> None:
    """Wait until a process has ended; whoever has it now may never wait for it."""
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


async def test_child_of_a_process_that_ends_itself_is_killed(
    caller: ProcessCaller, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match="status 7"):
        await caller("dies_with_child", str(tmp_path / "pid"))

    child = int((tmp_path / "pid").read_text())
    await asyncio.to_thread(wait_ended, child)


async def test_text_of_an_error_need_not_be_unicode(caller: ProcessCaller) -> None:
    with pytest.raises(JobError, match=r"ValueError: a\\ud800"):
        await caller("demo.fail", "a\ud800")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="for systems that have it")
async def test_forked_process_leaves_the_call_to_its_parent(
    trusting: ProcessCaller,
) -> None:
    def fork(in_child: Callable[[], object]) -> object:
        if not (child := os.fork()):
            return in_child()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert await trusting.run(code_call(fork, lambda: 3)) == 0
    assert await trusting.run(code_call(fork, lambda: sys.exit(3))) == 3
    assert await trusting.run(code_call(fork, lambda: 1 / 0)) == 1
    assert await trusting("demo.add", 20, 22) == 42


async def test_cancelled_waiting_call_takes_no_process(
    caller: ProcessCaller, gate: Gate
) -> None:
    running = asyncio.create_task(caller("waits", *gate.args))
    await gate.reached()
    waiting = asyncio.create_task(caller("demo.add", 1))
    await asyncio.sleep(0)
    waiting.cancel()
    await gate.open()
    await running

    assert await caller("demo.add", 2) == 2


async def test_instances_and_arrays_arrive_as_they_are(typed: ProcessCaller) -> None:
    assert await typed("mirror", Point(1, 2)) == Point(2, 1)
    assert await typed("total", np.arange(5.0)) == 10.0
    assert (await typed("ones", 3)).tolist() == [1, 1, 1]


async def test_arguments_of_others_are_converted_to_hints(typed: ProcessCaller) -> None:
    def inexact(name: str, *args: object) -> Call:
        return replace(call(name, *args), exact=False)

    assert await typed.run(inexact("mirror", {"x": 1, "y": 2})) == {"x": 2, "y": 1}
    assert await typed.run(inexact("total", [1, 2])) == 3.0
    with pytest.raises(JobError, match=r"ValueError: point: Expected `int`"):
        await typed.run(inexact("mirror", {"x": "a"}))


@pytest.mark.parametrize("size", [3, 1_000_000])
async def test_array_is_writable_in_the_function(
    typed: ProcessCaller, size: int
) -> None:
    doubled = await typed("double", np.ones(size))

    assert doubled.sum() == 2 * size


async def test_large_argument_is_mapped_from_its_file(
    typed: ProcessCaller, tmp_path: Path
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(pack(np.ones(100_000)).data)
    requested: list[bytes] = []

    async def fetch(digest: bytes) -> Path:
        requested.append(digest)
        return path

    refers = call("total", Ref(b"d" * 32))
    values = [
        await typed.processes.call(refers, fetch, ignore_progress) for _ in range(3)
    ]

    assert [ValueReader().read(each) for each in values] == [100_000.0] * 3
    assert requested == [b"d" * 32]


async def test_function_may_write_to_a_large_argument(
    typed: ProcessCaller, tmp_path: Path
) -> None:
    path = tmp_path / "blob"
    path.write_bytes(pack(np.ones(100_000)).data)

    async def fetch(digest: bytes) -> Path:
        return path

    doubles = call("double", Ref(b"e" * 32))
    values = [
        await typed.processes.call(doubles, fetch, ignore_progress) for _ in range(2)
    ]

    assert [ValueReader().read(each).sum() for each in values] == [200_000.0] * 2
    assert ValueReader().read(path.read_bytes()).sum() == 100_000.0


async def test_missing_large_argument_is_unavailable(typed: ProcessCaller) -> None:
    with pytest.raises(Unavailable, match="no blobs here"):
        await typed("total", Ref(b"f" * 32))


async def test_sent_function_runs_if_code_is_trusted(trusting: ProcessCaller) -> None:
    factor = 3

    assert await trusting.run(code_call(lambda x: x * factor, 14)) == 42
    assert (await trusting.run(code_call(lambda: Point))) is Point


async def test_sent_function_is_rejected_with_a_hint(caller: ProcessCaller) -> None:
    with pytest.raises(InvalidRequest, match="--trust-code"):
        await caller.run(code_call(len, [1]))


async def test_code_of_another_version_of_python_is_left_to_other_workers(
    trusting: ProcessCaller,
) -> None:
    with pytest.raises(Unavailable, match=r"code of Python 3\.1; this worker has 3"):
        await trusting.run(replace(code_call(abs, -2), python="3.1"))

    assert await trusting.run(replace(code_call(abs, -2), python=PYTHON)) == 2
    assert await trusting.run(replace(call("demo.add", 1), python="3.1")) == 1


async def test_registered_function_unpickles_nothing(
    caller: ProcessCaller, trusting: ProcessCaller
) -> None:
    pickled = pack([Evil()], form=Form.EXACT_OR_PICKLED).data
    for each in (caller, trusting):
        with pytest.raises(InvalidRequest, match=r"pickled.*--trust-code"):
            await each.run(Call("demo.ident", pickled, b"\x80"))

        assert await each("demo.add", 1) == 1


class Evil:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (66,)


async def test_repeated_function_is_unpickled_once(trusting: ProcessCaller) -> None:
    counting = code_call(_counts())

    assert [await trusting.run(counting) for _ in range(3)] == [1, 2, 3]


def _counts() -> object:
    calls = []

    def count() -> int:
        calls.append(0)
        return len(calls)

    return count


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("import nothing_of_this_name\n", "No module named 'nothing_of_this_name'"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("by_name", [False, True])
async def test_import_error_has_a_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    last: str,
    *,
    by_name: bool,
) -> None:
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    module = "broken" if by_name else str(tmp_path / "broken.py")
    processes = ProcessPool([module], 1 if by_name else 2, trust_code=False)

    with pytest.raises(ConfigError) as raised:
        await processes.start()

    first, *lines = str(raised.value).splitlines()
    assert first == f"--tasks {module} could not be imported:"
    assert last in lines[-1]
    frames = [line for line in lines if line.startswith("  File ")]
    assert len(frames) == 1
    assert all("broken.py" in line for line in frames)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("tasks.of_nobody", "no such module: neither "),
        ("tasks.demo_tasks:add", "all tasks of a module: --tasks tasks.demo_tasks$"),
        (".", "is a folder; expected a module, such as sums, or its file"),
        ("../sums", "expected a module, such as sums, or its file"),
        ("json", "no task found; decorate functions with @shoal.task"),
    ],
)
async def test_module_without_tasks_is_rejected_in_one_line(
    module: str, why: str
) -> None:
    processes = ProcessPool(["tasks.demo_tasks", module], 1, trust_code=False)

    with pytest.raises(ConfigError, match=why) as raised:
        await processes.start()

    assert str(raised.value).startswith(f"--tasks {module}: ")
    assert "\n" not in str(raised.value)


async def test_cancelled_failing_start_waits_for_its_process() -> None:
    class Doomed(ChildProcess):
        def kill(self) -> None:
            super().kill()
            starting.cancel()  # as when another one has failed at the same time

    ended: list[ChildProcess] = []
    starting = asyncio.create_task(
        Doomed.start(["of_nobody"], trust=False, threads=1, on_end=ended.append)
    )
    await asyncio.wait([starting])

    assert starting.cancelled()
    assert len(ended) == 1


async def test_file_is_imported_with_its_sibling_modules(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside_it.py").write_text("ANSWER = 42\n")
    (tmp_path / "sums_here.py").write_text(
        "import shoal.tasks.registry as r, beside_it\n\n"
        "@r.task\ndef answer():\n    return beside_it.ANSWER\n"
    )

    async with caller_of(str(tmp_path / "sums_here.py")) as caller:
        assert await caller("sums_here.answer") == 42


async def test_processes_do_not_outlive_their_worker() -> None:
    async with caller_of(slots=2) as caller:
        pid = await caller("pid")

    assert not psutil.pid_exists(pid)


async def test_owner_learns_once_of_hints_that_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = tmp_path / "odd.py"
    module.write_text("import shoal\n@shoal.task\ndef f(x: 'Nowhere', y: int): ...\n")
    pool = ProcessPool([str(module)], 2, trust_code=False)

    await pool.start()
    await pool.close()

    (record,) = caplog.records
    assert record.getMessage().startswith("odd.f: the type hint of 'x' cannot be used")
