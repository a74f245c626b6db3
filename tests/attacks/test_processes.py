"""A coordinator in a process of its own."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientError, ClientSession

from attacks.raw import BINARY, frame, request, upgrade
from attacks.siege import (
    ANSWER,
    CHAT,
    HONEST,
    PROMPT,
    SECRETS,
    TOKEN,
    address,
    body,
)
from attacks.test_frames import BROKEN, UNMASKED
from attacks.test_http import GARBAGE, ODD
from gateway.serving import KEY, WAIT_MAX, Node, eventually

pytestmark = pytest.mark.long

NO_HEADERS: Mapping[str, str] = {}


@dataclass(slots=True)
class Coordinator:
    """The process, with its standard error."""

    process: asyncio.subprocess.Process
    url: str
    session: ClientSession
    log: bytearray

    @asynccontextmanager
    async def node(self, name: str, model: str = HONEST) -> AsyncIterator[Node]:
        socket = await self.session.ws_connect(self.url + address(name, model))
        node = Node(socket)
        reading = asyncio.create_task(node.read())
        try:
            yield node
        finally:
            await socket.close()
            await reading

    async def ask(
        self, *, stream: bool = False, headers: Mapping[str, str] = NO_HEADERS
    ) -> str:
        async with self.session.post(
            self.url + CHAT,
            data=json.dumps(body(HONEST, stream=stream)),
            headers={"Authorization": f"Bearer {KEY}", **headers},
        ) as response:
            return await response.text()

    async def wait_registered(self) -> None:
        """Wait until a model is offered."""
        async with asyncio.timeout(WAIT_MAX):
            while True:
                async with self.session.get(
                    self.url + "/v1/models", headers={"Authorization": f"Bearer {KEY}"}
                ) as response:
                    if (await response.json())["data"]:
                        return

    async def settled(self, workers: int) -> None:
        """Wait until the pool knows the connected and disconnected nodes."""
        async with asyncio.timeout(WAIT_MAX):
            while True:
                async with self.session.get(
                    self.url + "/admin/status",
                    headers={"Authorization": f"Bearer {KEY}"},
                ) as response:
                    if len((await response.json())["workers"]) == workers:
                        return

    async def send(self, data: bytes) -> None:
        """Send bytes on a raw connection, and wait for the response."""
        port = urlsplit(self.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionError, TimeoutError):
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(0.5):
                while await reader.read(1 << 16):
                    pass
        writer.transport.abort()


@asynccontextmanager
async def running(
    folder: Path, drain: str = str(WAIT_MAX)
) -> AsyncIterator[Coordinator]:
    """Run ``shoal serve``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal", "serve", "--json", "--log-level", "debug"),
        *("--port", "0", "--data-dir", str(folder), "--drain", drain),
        *("--api-key", KEY, "--join-token", TOKEN),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    log = bytearray()

    async def follow(stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            log.extend(data)

    following = asyncio.create_task(follow(process.stderr))
    try:
        async with asyncio.timeout(WAIT_MAX):
            ready = json.loads(await process.stdout.readline())
        async with ClientSession() as session:
            yield Coordinator(process, ready["url"], session, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await following


def check_log(log: bytearray) -> None:
    text = log.decode()
    assert "Traceback" not in text, text
    assert " ERROR " not in text, text
    assert not [secret for secret in SECRETS if secret in text]


async def test_process_survives_every_raw_attack(tmp_path: Path) -> None:
    stranger = upgrade(address(token="wrong"))
    attacks = [
        *(attack + b"\r\n\r\n" for attack in GARBAGE.values()),
        *(request(line, "Connection: close") for line in ODD.values()),
        *(stranger + attack for attack in (BROKEN | UNMASKED).values()),
        *(upgrade(address()) + attack for attack in BROKEN.values()),
        *(
            upgrade(address(f"n{size}")) + frame(BINARY, bytes(size))
            for size in range(4)
        ),
    ]
    async with running(tmp_path) as its:
        await asyncio.gather(*(its.send(attack) for attack in attacks))
        # Else the question could go to three of them in turn, who are gone.
        await its.settled(0)
        async with its.node("n1") as node:
            await its.wait_registered()
            pending = asyncio.create_task(its.ask())
            await node.answer(ANSWER)
            assert ANSWER in await pending
            assert PROMPT in node.texts[0]
        its.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_MAX):
            assert await its.process.wait() == 0

    check_log(its.log)


async def test_killed_process_runs_a_keyed_job_once(
    tmp_path: Path,
) -> None:
    name = {"Idempotency-Key": "once"}
    async with running(tmp_path) as its, its.node("n1") as node:
        await its.wait_registered()
        pending = asyncio.create_task(its.ask(headers=name))
        task = await node.task()
        await node.write(task["id"], ANSWER[:3])
        its.process.kill()
        with pytest.raises(ClientError):
            await pending

    async with running(tmp_path) as its, its.node("n2") as node:
        again = [asyncio.create_task(its.ask(headers=name)) for _ in range(5)]
        await node.answer(ANSWER)
        answers = {await each for each in again}
        job = json.loads(await its.ask(headers=name))

        assert [json.loads(each)["id"] for each in answers] == [job["id"]]
        assert job["choices"][0]["message"]["content"] == ANSWER
        assert len(node.tasks) == 1


async def test_stopped_process_finishes_its_streams(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as its, its.node("n1") as node:
        await its.wait_registered()
        pending = asyncio.create_task(its.ask(stream=True))
        task = await node.task()
        await node.write(task["id"], ANSWER[:5])
        its.process.send_signal(signal.SIGTERM)
        await eventually(lambda: b"stopping" in its.log)
        await node.write(task["id"], ANSWER[5:])
        await node.end(task["id"])

        assert (await pending).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(WAIT_MAX):
            assert await its.process.wait() == 0

    check_log(its.log)


async def test_process_without_grace_aborts_its_streams(tmp_path: Path) -> None:
    async with running(tmp_path, drain="0") as its, AsyncExitStack() as stack:
        node = await stack.enter_async_context(its.node("n1"))
        await its.wait_registered()
        pending = [asyncio.create_task(its.ask(stream=n % 2 == 0)) for n in range(8)]
        await node.task(7)
        for task in node.tasks:
            await node.write(task["id"], ANSWER)
        its.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_MAX):
            assert await its.process.wait() == 0

        for answer in await asyncio.gather(*pending, return_exceptions=True):
            # Cut off, or told so: never taken for whole.
            assert isinstance(answer, BaseException) or "[DONE]" not in answer
        await eventually(lambda: node.closed is not None)

    check_log(its.log)
