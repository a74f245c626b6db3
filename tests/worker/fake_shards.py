"""A shard's process that is none: what connects gets back what it sends."""

import asyncio
import socket

from shoal.domain.errors import Unavailable
from shoal.domain.work import Shard
from shoal.ledger.keys import Signer
from shoal.worker.shard_port import LentProcess, ShardPort

PROTOCOL = "ggml-rpc 8.0.0"
GROUP = "big-1"
RUNNER = Signer.from_seed(bytes(32))


class EchoShard:
    """It works until it is given a ``trouble``, and runs until ``exit``."""

    def __init__(self, protocol: str = PROTOCOL) -> None:
        self.protocol = protocol
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.trouble: str | None = None
        self.connections = 0
        self.open = 0
        self._echoes: set[asyncio.Task[None]] = set()

    async def connect(self) -> socket.socket:
        if (fault := self.fault()) is not None:
            raise Unavailable(f"the shard cannot be reached: {fault}")
        near, far = socket.socketpair()
        self.connections += 1
        echo = asyncio.create_task(self._echo(far))
        self._echoes.add(echo)
        echo.add_done_callback(self._echoes.discard)
        near.setblocking(False)
        return near

    def fault(self) -> str | None:
        return self.exited.result() if self.exited.done() else self.trouble

    def exit(self, reason: str) -> None:
        if not self.exited.done():
            self.exited.set_result(reason)

    async def close(self) -> None:
        self.exit("closed")
        for echo in self._echoes:
            echo.cancel()

    async def _echo(self, far: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=far)
        self.open += 1
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            self.open -= 1
            writer.close()


async def open_port(
    process: LentProcess, runner: Signer = RUNNER, group: str = GROUP
) -> ShardPort:
    return await ShardPort.open("127.0.0.1", group, runner.public_key.hex(), process)


def shard_at(port: ShardPort, machine: str = "anna") -> Shard:
    return Shard(machine, 10, 0, port.hosts, port.port, port.fingerprint)
