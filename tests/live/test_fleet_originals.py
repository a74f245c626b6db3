"""Imitated original MacFleet programs, with real Shoal processes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import shoal
from harness.ports import free_port
from live.programs import KEY, PATIENCE, Pool, Program, Programs, eventually
from originals.macfleet import (
    RESULT,
    Frame,
    PeerTransport,
    PoolAgent,
    RemoteTaskError,
    TaskDispatcher,
    TaskWorker,
    packed,
)
from shoal.domain.errors import TooLarge
from tasks.callers import Gate

TOKEN = "a-fleet-token"
HUB = "hub"
TASKS = Path(__file__).parents[1] / "tasks" / "demo_tasks.py"
SECURE = ("--macfleet-token", TOKEN)
OPEN = ("--macfleet-open",)
FLEETS = pytest.mark.parametrize(
    ("token", "flags"), [(TOKEN, SECURE), ("", OPEN)], ids=["secure", "open"]
)


def fail() -> None:
    raise ValueError("zap")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "demo.add": lambda a, b: a + b,
    "demo.echo": lambda value: value,
    "demo.fail": fail,
    "demo.zeros": bytes,
    "demo.size": len,
}


def serve(programs: Programs, *flags: str) -> Pool:
    ports = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
    return programs.serve("--name", HUB, *ports, *flags)


def port_of(pool: Pool, label: str = "transport") -> int:
    port: int = pool.ready["ports"][f"macfleet_{label}"]
    return port


def calling(pool: Pool) -> shoal.AsyncPool:
    return shoal.AsyncPool(pool.url, api_key=KEY)


async def wait_joined(pool: Pool, name: str) -> None:
    """Wait until the pool has a worker of the name, with slots."""

    def there() -> bool:
        return f"macfleet:{name}" in [worker["id"] for worker in pool.workers()]

    await asyncio.to_thread(eventually, there, f"{name} is a worker")


async def wait_left(pool: Pool, name: str) -> None:
    """Wait until the pool has no worker of the name."""

    def gone() -> bool:
        return f"macfleet:{name}" not in [worker["id"] for worker in pool.workers()]

    await asyncio.to_thread(eventually, gone, f"{name} has left")


async def until(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(eventually, condition, "what should follow")


@FLEETS
async def test_dialling_worker_runs_the_pools_jobs(
    programs: Programs, token: str, flags: tuple[str, ...]
) -> None:
    pool = serve(programs, *flags)
    transport = PeerTransport("mac-1234abcd", token)
    worker = TaskWorker(await transport.connect(HUB, port_of(pool)), FUNCTIONS)

    async with worker.running(), calling(pool) as calls, asyncio.timeout(PATIENCE):
        await wait_joined(pool, "mac-1234abcd")
        assert await calls.call("demo.add", 19, 23) == 42
        assert await calls.call("demo.echo", {"a": [1, None, b"\x00"]}) == {
            "a": [1, None, b"\x00"]
        }
        with pytest.raises(ValueError, match="zap") as caught:
            await calls.call("demo.fail")
        assert "def fail" not in str(caught.value)
        assert 'raise ValueError("zap")' in str(caught.value.__cause__)
        assert await calls.map("demo.add", range(20), range(20)) == [*range(0, 40, 2)]
        assert await calls.call("demo.size", bytes(1 << 20)) == 1 << 20
        with pytest.raises(shoal.PlainValuesOnly, match=r"^args\[1\]\.b: "):
            await calls.call("demo.add", 1, {"b": {2}})
    await transport.disconnect()

    assert worker.dead == ""


async def test_older_handshake_is_admitted_if_allowed(
    programs: Programs,
) -> None:
    pool = serve(programs, *SECURE, "--macfleet-v1")
    transport = PeerTransport("old-1", TOKEN, v1=True)
    worker = TaskWorker(await transport.connect(HUB, port_of(pool)), FUNCTIONS)

    async with worker.running(), calling(pool) as calls:
        assert await calls.call("demo.add", 1, 2) == 3
    await transport.disconnect()


@pytest.mark.parametrize(
    ("token", "tls", "flags"),
    [(TOKEN, True, SECURE), ("", False, OPEN), ("", True, (*OPEN, "--macfleet-tls"))],
    ids=["secure", "open", "open with tls"],
)
async def test_worker_is_discovered_by_heartbeat_and_dialled(
    programs: Programs, token: str, tls: bool, flags: tuple[str, ...]
) -> None:
    # A pong of an open fleet has no data port: it is the one after the heartbeats'.
    port = free_port(2)
    transport = PeerTransport("mac-5", token, open_tls=tls)
    agent = PoolAgent("mac-5", token, open_tls=tls)
    async with transport.listening(port=port + 1), agent.listening(port=port):
        agent.data_port = port + 1
        pool = serve(programs, *flags, "--macfleet-peers", f"127.0.0.1:{port}")
        worker = TaskWorker(await transport.connection_to(HUB), FUNCTIONS)
        async with worker.running(), calling(pool) as calls:
            assert await calls.call("demo.add", 19, 23) == 42
    assert HUB in agent.pings


async def test_worker_that_pings_the_coordinator_is_dialled(programs: Programs) -> None:
    pool = serve(programs, *SECURE)
    port = free_port(2)
    transport = PeerTransport("mac-6", TOKEN)
    agent = PoolAgent("mac-6", TOKEN, data_port=port + 1)
    async with transport.listening(port=port + 1), agent.listening(port=port):
        assert await agent.ping(port_of(pool, "heartbeat"))  # --peer HUB, once
        worker = TaskWorker(await transport.connection_to(HUB), FUNCTIONS)
        async with worker.running(), calling(pool) as calls:
            assert await calls.call("demo.add", 19, 23) == 42


async def test_worker_of_version_2_1_is_dialled_after_its_heartbeat_port(
    programs: Programs,
) -> None:
    port = free_port(2)
    transport = PeerTransport("mac-old", TOKEN, v1=True)
    agent = PoolAgent("mac-old", TOKEN, v1=True)
    async with transport.listening(port=port + 1), agent.listening(port=port):
        contact = ("--macfleet-peers", f"127.0.0.1:{port}")
        pool = serve(programs, *SECURE, "--macfleet-v1", *contact)
        worker = TaskWorker(await transport.connection_to(HUB), FUNCTIONS)
        async with worker.running(), calling(pool) as calls:
            assert await calls.call("demo.add", 19, 23) == 42
        nodes = pool.admin("status")["nodes"]
        (remark,) = [each["remark"] for each in nodes if each["name"] == "mac-old"]
    assert remark == f"reported no hardware; port {port + 1} is dialled"


async def test_our_worker_joins_an_open_fleet_with_tls(programs: Programs) -> None:
    port = free_port(2)
    transport = PeerTransport("boss-4", open_tls=True)
    agent = PoolAgent("boss-4", open_tls=True)
    async with transport.listening(port=port + 1), agent.listening(port=port):
        flags = ("--wire", "macfleet", "--name", "ours", "--tasks", str(TASKS))
        programs.run("join", f"tls-any://127.0.0.1:{port}", "--json", *flags)
        dispatcher = TaskDispatcher([await transport.connection_to("ours")])
        async with dispatcher.running():
            assert await dispatcher.submit("demo.add", 19, 23) == 42


@FLEETS
async def test_agent_pings_the_coordinator(
    programs: Programs, token: str, flags: tuple[str, ...]
) -> None:
    pool = serve(programs, *flags)

    found = await PoolAgent("mac-6", token).ping(port_of(pool, "heartbeat"))

    if token:
        assert found is not None
        assert found["id"] == HUB
        assert found["data_port"] == port_of(pool)
        assert found["ram_gb"] > 0


@FLEETS
async def test_dialling_dispatcher_submits_to_the_pool(
    programs: Programs, token: str, flags: tuple[str, ...]
) -> None:
    pool = serve(programs, *flags)
    our_nonce = ("--tasks", str(TASKS), "--slots", "2", "--wire", "macfleet")
    ours_there = pool.join("ours", *our_nonce, token=token)
    await asyncio.to_thread(ours_there.event, "joined")
    transport = PeerTransport("boss-1", token)
    connection = await transport.connect(HUB, port_of(pool))

    dispatcher = TaskDispatcher([connection])
    async with dispatcher.running():
        assert await dispatcher.submit("demo.add", 19, 23) == 42
        assert await dispatcher.map("demo.ident", [1, "two", None]) == [1, "two", None]
        with pytest.raises(RemoteTaskError, match="zap"):
            await dispatcher.submit("demo.fail", "zap")
        with pytest.raises(RemoteTaskError, match="nope"):
            await dispatcher.submit("demo.nope")
    await transport.disconnect()


async def test_dispatchers_timeout_covers_waiting_as_well(programs: Programs) -> None:
    pool = serve(programs, *SECURE)
    worker = pool.join("ours", "--tasks", str(TASKS), "--slots", "1")
    await asyncio.to_thread(worker.event, "joined")
    transport = PeerTransport("boss-3", TOKEN)
    connection = await transport.connect(HUB, port_of(pool))

    dispatcher = TaskDispatcher([connection])
    async with dispatcher.running():
        running = asyncio.create_task(dispatcher.submit("demo.sleep", 2))
        for _ in range(2):
            with pytest.raises(RemoteTaskError, match=r"timed out after 0\.5s"):
                await dispatcher.submit("demo.sleep", 600, timeout_=0.5)
        assert await dispatcher.submit("demo.add", 19, 23) == 42  # the slot is free
        await running
    await transport.disconnect()


async def test_call_whose_result_cannot_be_encoded_ends(programs: Programs) -> None:
    pool = serve(programs, *SECURE, "--macfleet-slots", "1")
    transport = PeerTransport("mac-silent", TOKEN)
    functions = {**FUNCTIONS, "demo.set": lambda: {1, 2}}
    worker = TaskWorker(await transport.connect(HUB, port_of(pool)), functions)

    async with worker.running(), calling(pool) as calls, asyncio.timeout(PATIENCE):
        await wait_joined(pool, "mac-silent")
        # The wire's limit or the pool's, whichever comes first.
        with pytest.raises(shoal.TaskTimeout, match=r"(sent|returned) no result"):
            await calls.with_options(timeout=0.5).call("demo.set")
        assert await calls.call("demo.add", 19, 23) == 42  # the slot is free
    await transport.disconnect()


@FLEETS
async def test_our_worker_joins_an_original_dispatcher(
    programs: Programs, token: str, flags: tuple[str, ...]
) -> None:
    transport = PeerTransport("boss-2", token)
    async with transport.listening() as data_port:
        agent = PoolAgent("boss-2", token, data_port=data_port)
        async with agent.listening() as port:
            where = port if token else data_port
            worker = programs.run(
                "join",
                f"127.0.0.1:{where}",
                "--json",
                "--wire",
                "macfleet",
                "--name",
                "ours",
                "--token",
                token,
                "--tasks",
                str(TASKS),
            )
            dispatcher = TaskDispatcher([await transport.connection_to("ours")])
            async with dispatcher.running():
                assert await dispatcher.submit("demo.add", 19, 23) == 42
                with pytest.raises(RemoteTaskError, match=r"Known tasks: .*demo\.add"):
                    await dispatcher.submit("demo.nope")
                with pytest.raises(RemoteTaskError, match=r"timed out after 0\.2s"):
                    await dispatcher.submit("demo.sleep", 30, timeout_=0.2)
                # What the original would never have answered.
                with pytest.raises(RemoteTaskError):
                    await dispatcher.submit("demo.unserializable")
            assert await asyncio.to_thread(worker.terminate) == 0


def listen(programs: Programs, name: str, *flags: str) -> Program:
    """Start a Shoal worker that listens on loopback; any of its ports is free."""
    return programs.run(
        *("join", "--listen", "--listen-host", "127.0.0.1", "--json", "--name", name),
        *("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0"),
        *("--tasks", str(TASKS), *flags),
    )


@pytest.mark.short
async def test_dispatcher_finds_and_dials_our_lone_worker(
    programs: Programs, tmp_path: Path
) -> None:
    gate = Gate.make(tmp_path)
    worker = listen(programs, "ours", "--token", TOKEN)
    ports = (await asyncio.to_thread(worker.event, "listening"))["ports"]

    found = await PoolAgent("boss-5", TOKEN).ping(ports["heartbeat"])  # --peer

    assert found is not None
    assert (found["id"], found["data_port"]) == ("ours", ports["transport"])
    transport = PeerTransport("boss-5", TOKEN)
    connection = await transport.connect(found["id"], found["data_port"])
    dispatcher = TaskDispatcher([connection])
    async with dispatcher.running():
        assert await dispatcher.submit("demo.add", 19, 23) == 42
        joined = await asyncio.to_thread(worker.event, "joined")
        assert joined["coordinator"] == "boss-5"
        with pytest.raises(RemoteTaskError, match=r"Known tasks: .*demo\.add"):
            await dispatcher.submit("demo.nope")
        last = asyncio.create_task(dispatcher.submit("waits", *gate.args))
        await gate.reached()
        worker.process.terminate()
        await asyncio.to_thread(worker.event, "leaving")
        await gate.open()
        assert await last is None
        assert await asyncio.to_thread(worker.wait) == 0
    await transport.disconnect()


@FLEETS
async def test_dispatchers_share_our_lone_worker(
    programs: Programs, token: str, flags: tuple[str, ...]
) -> None:
    worker = listen(programs, "ours", "--slots", "1", *flags)
    port = (await asyncio.to_thread(worker.event, "listening"))["ports"]["transport"]
    transports = [PeerTransport(name, token) for name in ("boss-6", "boss-7")]
    one, other = [
        TaskDispatcher([await each.connect("ours", port)]) for each in transports
    ]

    async with one.running(), other.running():
        returned = await asyncio.gather(
            one.map("demo.ident", range(20)), other.map("demo.ident", range(20))
        )
        assert [*returned] == [[*range(20)]] * 2
        await transports[0].disconnect()
        assert await other.submit("demo.add", 19, 23) == 42
    await transports[1].disconnect()


async def test_our_lone_worker_dials_a_dispatcher_that_it_is_told_of(
    programs: Programs,
) -> None:
    transport = PeerTransport("boss-8", TOKEN)
    async with transport.listening() as data_port:
        agent = PoolAgent("boss-8", TOKEN, data_port=data_port)
        async with agent.listening() as port:
            listen(programs, "ours", f"127.0.0.1:{port}", "--token", TOKEN)
            dispatcher = TaskDispatcher([await transport.connection_to("ours")])
            async with dispatcher.running():
                assert await dispatcher.submit("demo.add", 19, 23) == 42


async def test_our_lone_worker_admits_no_other_fleet(programs: Programs) -> None:
    worker = listen(programs, "ours", "--token", TOKEN)
    ports = (await asyncio.to_thread(worker.event, "listening"))["ports"]

    assert await PoolAgent("boss-9", "another-token").ping(ports["heartbeat"]) is None
    for stranger in (PeerTransport("boss-9", "another-token"), PeerTransport("boss-9")):
        with pytest.raises((OSError, EOFError)):
            await stranger.connect("ours", ports["transport"])
    assert await asyncio.to_thread(worker.terminate) == 0


@pytest.mark.parametrize("name", ["a-worker", "z-worker"])  # the smaller name dials
async def test_coordinators_and_a_lone_worker_find_each_other(
    programs: Programs, tmp_path: Path, name: str
) -> None:
    """Each is told of the other, so that both may dial at the same time."""
    worker = listen(programs, name, "--token", TOKEN)
    ports = (await asyncio.to_thread(worker.event, "listening"))["ports"]
    contact = ("--macfleet-peers", f"127.0.0.1:{ports['heartbeat']}")
    pool = serve(programs, *SECURE, *contact)
    others = Programs(tmp_path / "other")
    try:
        other = serve(others, *SECURE, "--name", "another-hub", *contact)
        for each in (pool, other):
            await wait_joined(each, name)
            async with calling(each) as calls:
                assert await calls.call("demo.add", 19, 23) == 42
    finally:
        others.close()
    async with calling(pool) as calls:
        assert await calls.call("demo.add", 1, 2) == 3
    assert await asyncio.to_thread(worker.terminate) == 0
    await wait_left(pool, name)


async def leave(worker: TaskWorker, transport: PeerTransport) -> None:
    """End the connection cleanly."""
    await transport.disconnect()


async def corrupt(worker: TaskWorker, transport: PeerTransport) -> None:
    """Send a frame with a wrong checksum."""
    whole = Frame(1, RESULT, 0, 0, packed({"task_id": "x", "ok": True}))
    broken = bytearray(whole.packed())
    broken[-1] ^= 1
    worker.connection.writer.write(bytes(broken))
    await worker.connection.writer.drain()
    await until(lambda: worker.dead)  # it is hung up on


@pytest.mark.parametrize("end", [leave, corrupt])
async def test_task_of_a_lost_worker_is_requeued_once(
    programs: Programs,
    end: Callable[[TaskWorker, PeerTransport], Awaitable[None]],
) -> None:
    pool = serve(programs, *SECURE, "--log-level", "info")
    stuck = threading.Event()
    there = {"demo.add": lambda a, b: stuck.wait(PATIENCE)}

    async def end_in_a_task(name: str) -> None:
        transport = PeerTransport(name, TOKEN)
        worker = TaskWorker(await transport.connect(HUB, port_of(pool)), there)
        async with worker.running():
            await until(lambda: "demo.add" in worker.names)
            await end(worker, transport)
        await transport.disconnect()

    async with calling(pool) as calls, asyncio.timeout(PATIENCE):
        first = await calls.submit("demo.add", 19, 23)
        await end_in_a_task("mac-a")
        transport = PeerTransport("mac-b", TOKEN)
        worker = TaskWorker(await transport.connect(HUB, port_of(pool)), FUNCTIONS)
        async with worker.running():
            assert await first == 42
        await transport.disconnect()
        await wait_left(pool, "mac-b")

        second = await calls.submit("demo.add", 19, 23)
        await end_in_a_task("mac-c")
        await end_in_a_task("mac-d")
        cause = "CRC32" if end is corrupt else "connection|closed"
        with pytest.raises(shoal.WorkerLost, match=cause):
            await second
    stuck.set()


async def test_oversized_result_fails_its_call_and_keeps_the_worker(
    programs: Programs,
) -> None:
    pool = serve(programs, *SECURE)
    transport = PeerTransport("mac-large", TOKEN)
    worker = TaskWorker(await transport.connect(HUB, port_of(pool)), FUNCTIONS)

    async with worker.running(), calling(pool) as calls, asyncio.timeout(PATIENCE):
        await wait_joined(pool, "mac-large")
        for durable in (True, False):
            with pytest.raises(TooLarge, match=r"returned 3[0-9]{8} bytes"):
                await calls.with_options(durable=durable).call("demo.zeros", 300 << 20)
        assert await calls.call("demo.add", 19, 23) == 42
    await transport.disconnect()

    assert worker.dead == ""


async def test_wrong_token_is_rejected_at_either_end(programs: Programs) -> None:
    pool = serve(programs, *SECURE)

    with pytest.raises((OSError, EOFError)):
        await PeerTransport("mac-7", "another-token").connect(HUB, port_of(pool))
    assert await PoolAgent("mac-8", TOKEN).ping(port_of(pool, "heartbeat"))


async def test_http_task_is_run_by_an_original_worker(
    programs: Programs,
) -> None:
    pool = serve(programs, *SECURE)
    transport = PeerTransport("mac-9", TOKEN)
    worker = TaskWorker(await transport.connect(HUB, port_of(pool)), FUNCTIONS)

    def ask() -> Any:
        with pool.client() as client:
            body = {
                "job_type": "TASK",
                "payload": {"task_type": "demo.add", "args": [19, 23]},
                "user_id": "u",
            }
            url = f"{pool.url}/v1/jobs"
            job: Any = client.post(f"{url}/commit/fast", body=body, cast_to=object)
            path = f"{url}/{job['job_id']}?wait=60"
            return client.get(path, cast_to=object)

    async with worker.running():
        await wait_joined(pool, "mac-9")
        shown = await asyncio.to_thread(ask)
    await transport.disconnect()

    assert "42" in str(shown)
