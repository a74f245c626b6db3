"""A worker behind network address translation: only it can open connections.

Between the two networks is a machine that passes on the connections of the worker's
network under an address of its own, and none the other way.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import shoal
from live.machines import Machine, two_networks
from live.programs import KEY, TESTS, TINY, eventually
from live.sites import Site
from models.tiny_answers import ANSWERS
from tasks.demo_tasks import add

PORT = 4010
SUM_OF_RANKS = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("shoal")
numbers = torch.full((100_000,), 1.0 + dist.get_rank())
dist.all_reduce(numbers)
dist.all_reduce(numbers, group=dist.new_group())
with open(os.environ["SHOAL_OUTPUT"] + "/sum", "w") as output:
    output.write(f"{dist.get_world_size()} ranks, {numbers[-1].item():g}")
dist.destroy_process_group()
"""
TASKS = str(TESTS / "tasks" / "demo_tasks.py")
Places = tuple[Site, Site]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    """The machines of the worker and of the coordinator."""
    with two_networks() as (one, middle, other):
        here, there = Site(one, tmp_path), Site(other, tmp_path)
        forwarder = _Forwarder(middle, other.address)
        forwarder.start()
        try:
            yield here, there
        finally:
            for place in (here, there):
                place.programs.close()
            forwarder.stop()


class _Forwarder(threading.Thread):
    """Passes connections to PORT of the machine in between on to an address."""

    def __init__(self, machine: Machine, target: str) -> None:
        super().__init__(daemon=True)
        self._machine = machine
        self._target = target
        self._ready = threading.Event()

    def start(self) -> None:
        super().start()
        self._ready.wait()

    def run(self) -> None:
        with self._machine.inside():
            asyncio.run(self._serve())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self.join()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with _serving(self._target):
            self._ready.set()
            await self._stopping.wait()


@asynccontextmanager
async def _serving(target: str) -> AsyncIterator[None]:
    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection(target, PORT)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, far_writer))
            both.create_task(_copy(far_reader, writer))

    async with await asyncio.start_server(forward, "0.0.0.0", PORT):
        yield


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def test_a_worker_joins_with_the_printed_token_and_does_all(places: Places) -> None:
    home, site = places
    pool = site.serve("--host", "0.0.0.0", "--port", str(PORT))
    with home.machine.inside(), pytest.raises(OSError, match="unreachable"):
        socket.create_connection((site.machine.address, PORT), 5.0)
    address = f"http://{home.machine.peer_address}:{PORT}"
    token = pool.ready["join"].rpartition("--token ")[2].split()[0]

    with home.machine.inside():
        worker = home.programs.run(
            *("join", address, "--json", "--name", "home", "--token", token),
            *("--model", f"tiny={TINY}", "--tasks", TASKS),
        )
        worker.event("joined")

    # Its functions and its model join one after the other.
    eventually(lambda: "tiny" in site.models(pool), "its model is there")
    for question, answer in ANSWERS.items():
        assert site.ask(pool, question, "tiny") == answer
    with (
        site.machine.inside(),
        shoal.Pool(pool.url, api_key=KEY) as functions,
    ):
        assert functions.submit(add, 1, 41).result() == 42
        found = pool.workers()
    assert {each["protection"] for each in found} == {"noise"}
    get = site.programs
    with site.machine.inside():
        copied = get.run(
            *("models", "get", "tiny", "--from", pool.url, "--token", token),
            *("--to", str(get.folder / "ours")),
        )
    assert copied.wait() == 0, copied.errors


def test_its_ranks_reach_the_others_through_the_coordinator(
    places: Places, tmp_path: Path
) -> None:
    home, site = places
    pool = site.serve("--host", "0.0.0.0", "--port", str(PORT))
    address = f"http://{home.machine.peer_address}:{PORT}"
    near = site.join(pool.url, "--name", "near", "--trust-code", "--slots", "1")
    far = home.join(address, "--name", "far", "--trust-code", "--slots", "1")
    for worker in (near, far):
        worker.event("joined")
    script, output = tmp_path / "sum.py", tmp_path / "out"
    script.write_text(SUM_OF_RANKS)

    with site.machine.inside():
        run = site.programs.run(
            *("train", "--url", pool.url, "--api-key", KEY, "--nodes", "2"),
            *("--output", str(output), str(script)),
        )

    assert run.wait() == 0, run.errors
    assert (output / "sum").read_text() == "2 ranks, 6"


def test_a_worker_comes_back_through_it(places: Places) -> None:
    home, site = places
    flags = ("--host", "0.0.0.0", "--port", str(PORT))
    pool = site.serve(*flags)
    address = f"http://{home.machine.peer_address}:{PORT}"
    worker = home.join(address, "--name", "home", "--model", f"tiny={TINY}")
    worker.event("joined")

    pool.program.kill()
    worker.event("lost")
    pool = site.serve(*flags)
    worker.event("joined")

    eventually(lambda: "tiny" in site.models(pool), "its model is back")
    assert site.ask(pool, "ping", "tiny") == ANSWERS["ping"]


def test_a_coordinator_behind_it_uses_a_worker_that_listens(places: Places) -> None:
    home, site = places
    model = ("--model", f"tiny={TINY}")
    worker = site.join("--listen", "--name", "gpu", *model, "--trust-code")
    assert worker.event("listening")["ports"] == {"http": PORT}

    pool = home.serve("--shoal-workers", f"{home.machine.peer_address}:{PORT}")
    worker.event("joined")

    eventually(lambda: "tiny" in home.models(pool), "its model is there")
    assert home.ask(pool, "ping", "tiny") == ANSWERS["ping"]
    with home.machine.inside(), shoal.Pool(pool.url, api_key=KEY) as functions:
        assert functions.submit(lambda: 6 * 7).result() == 42
    assert home.protections(pool) == {"noise"}
