"""The process of a shard: what it may do, how it is reached, and how it ends."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from shoal.domain.errors import Unavailable
from shoal.engines.shards import shard_process
from shoal.engines.shards.programs import ShardPrograms, find_programs
from shoal.engines.shards.shard_process import ShardProcess, can_isolate

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines it")

MEBIBYTE = 1 << 20


@pytest.fixture
async def programs(fakes: Path) -> ShardPrograms:
    found = await find_programs(fakes)
    assert found is not None
    return found


@pytest.fixture
async def shard(programs: ShardPrograms, tmp_path: Path) -> AsyncIterator[ShardProcess]:
    started = await ShardProcess.start(programs, tmp_path / "cache", memory=MEBIBYTE)
    yield started
    await started.close()


async def say(connected: socket.socket, line: str) -> str:
    """Send a line to the fake rpc-server; return its answer, empty if it has ended."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connected, line.encode() + b"\n")
    return (await loop.sock_recv(connected, 1024)).decode().strip()


async def ask(shard: ShardProcess, line: str) -> str:
    with await shard.connect() as connected:
        return await say(connected, line)


async def test_connections_follow_each_other(shard: ShardProcess) -> None:
    answers = [await ask(shard, f"echo {each}") for each in range(20)]

    assert answers == [str(each) for each in range(20)]


async def test_connection_that_nobody_waited_for_is_closed(shard: ShardProcess) -> None:
    abandoned = asyncio.create_task(shard.connect())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.wait({abandoned})

    # The fake serves one connection at a time: another one would never be answered.
    assert await ask(shard, "echo served") == "served"


async def test_without_isolation_it_has_a_loopback_port(
    programs: ShardPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_process, "ISOLATIONS", ())

    shard = await ShardProcess.start(programs, tmp_path / "cache")

    assert not shard.is_isolated
    assert await ask(shard, "echo here") == "here"
    assert shard.fault() is None
    await shard.close()


@linux
@pytest.mark.parametrize("command", shard_process.ISOLATIONS)
async def test_isolated_shard_reaches_nothing_and_nobody_reaches_it(
    programs: ShardPrograms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr(shard_process, "ISOLATIONS", (command,))
    if not await can_isolate():
        pytest.skip(f"not here: {command}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # With the port of a listener outside it: neither finds the other.
        monkeypatch.setattr(shard_process, "PORT", port)
        shard = await ShardProcess.start(programs, tmp_path / "cache")

        assert await ask(shard, "echo inside") == "inside"
        assert await ask(shard, f"connect {port + 1}") == "ConnectionRefusedError"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()

    assert shard.is_isolated
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    assert await ask(shard, "exit 3") == ""
    assert (await shard.exited).startswith("the shard ended with status 3")
    await shard.close()


@linux
async def test_shard_sees_its_own_files_alone(
    shard: ShardProcess, tmp_path: Path
) -> None:
    if not shard.hides_files:
        pytest.skip("this system has no Landlock")
    secret = tmp_path / "secret"
    secret.write_text("secret")

    assert await ask(shard, f"read {secret}") == "PermissionError"
    assert await ask(shard, "read /etc/passwd") == "PermissionError"
    assert await ask(shard, f"read /proc/{os.getpid()}/environ") != "done"
    assert await ask(shard, f"write {tmp_path}/new") == "PermissionError"
    assert await ask(shard, f"write {tmp_path}/cache/new") == "done"


@linux
async def test_shard_has_the_memory_that_it_was_given(shard: ShardProcess) -> None:
    limit = shard_process.OWN_MEMORY + MEBIBYTE

    assert await ask(shard, f"allocate {limit}") == "MemoryError"
    assert await ask(shard, f"allocate {MEBIBYTE}") == "done"


async def test_stopped_shard_has_a_fault(shard: ShardProcess) -> None:
    assert shard.fault() is None
    process = psutil.Process(shard.pid)
    (leaf,) = [each for each in process.children(recursive=True) if not each.children()]

    leaf.suspend()

    while shard.fault() is None:  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0)
    assert shard.fault() == "the shard's process is stopped"
    leaf.resume()
    while shard.fault() is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("exit 3", "the shard ended with status 3"),
        ("", "the shard was ended by SIGKILL"),
    ],
)
async def test_end_of_rpc_server_is_the_end_of_the_shard(
    shard: ShardProcess, line: str, reason: str
) -> None:
    if line:
        assert await ask(shard, line) == ""
    else:
        psutil.Process(shard.pid).children(recursive=True)[-1].kill()

    assert (await shard.exited).startswith(reason)
    assert shard.fault() == shard.exited.result()
    assert shard.activity() is None
    with pytest.raises(Unavailable, match=f"cannot be reached: {reason}"):
        await shard.connect()


async def test_closed_shard_leaves_no_process(
    programs: ShardPrograms, tmp_path: Path
) -> None:
    shard = await ShardProcess.start(programs, tmp_path / "cache")
    process = psutil.Process(shard.pid)
    family = [process, *process.children(recursive=True)]

    await shard.close()
    await shard.close()

    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not alive


async def test_shard_ends_with_a_killed_worker(fakes: Path, tmp_path: Path) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(fakes), str(tmp_path / "cache")),
        stdout=asyncio.subprocess.PIPE,
    )
    assert worker.stdout is not None
    shard = psutil.Process(int(await worker.stdout.readline()))
    family = [shard, *shard.children(recursive=True)]

    worker.send_signal(signal.SIGKILL)
    await worker.communicate()

    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not alive


WORKER = """
import asyncio, sys
from pathlib import Path
from shoal.engines.shards.programs import find_programs
from shoal.engines.shards.shard_process import ShardProcess

async def main():
    programs = await find_programs(Path(sys.argv[1]))
    shard = await ShardProcess.start(programs, Path(sys.argv[2]))
    print(shard.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_program_that_ends_at_once_says_why(
    programs: ShardPrograms, tmp_path: Path
) -> None:
    programs.rpc_server.write_text("#!/bin/sh\necho no device >&2\nexit 4\n")

    with pytest.raises(Unavailable, match=r"cannot be started: .* status 4: no device"):
        await ShardProcess.start(programs, tmp_path / "cache")
