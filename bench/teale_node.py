"""Workers of Shoal's own on TealeNet's LAN, that have nothing to do.

As a program: ``teale_node.py PORT COUNT`` has so many join, prints a line when all
have, and keeps them alive with a heartbeat every 5 s.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Sequence

from shoal.domain.work import JobKind
from shoal.domain.worker import Offer, ServedModel
from shoal.ledger.keys import Signer
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.session import Admitted, Send

HEARTBEAT_EVERY = 5.0  # seconds
JOINING_AT_ONCE = 100
READ_MAX = 1 << 16  # bytes of one read
TICK = 0.05  # seconds between looks for what is due


async def join(
    port: int, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """Join; return the connection, and a heartbeat as it is to be sent.

    Raises RuntimeError if that is refused.
    """
    loop = asyncio.get_running_loop()
    offer = Offer(frozenset({JobKind.CHAT}), frozenset({"m"}), slots=1)
    member = WorkerProfile(
        name,
        ServedModel("m"),
        1,
        "",
        identity=Signer.from_seed(secrets.token_bytes(32)),
        offers=(offer,),
        random_bytes=secrets.token_bytes,
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    dialer = discover()["tealenet"].dial(f"tcp://127.0.0.1:{port}", member)
    session = dialer.start_session({})
    outputs = [*session.tick(loop.time())]
    while not any(isinstance(each, Admitted) for each in outputs):
        writer.write(_said(outputs))
        try:
            data = await asyncio.wait_for(reader.read(READ_MAX), TICK)
        except TimeoutError:
            outputs = [*session.tick(loop.time())]
            continue
        if not data:
            raise RuntimeError("the coordinator hung up")
        outputs = [*session.receive([data], loop.time())]
    writer.write(_said(outputs))
    # The first also says what there is; the second is as all that follow.
    return reader, writer, _said(session.tick(loop.time() + HEARTBEAT_EVERY))


def _said(outputs: Sequence[object]) -> bytes:
    frames = [each.data for each in outputs if isinstance(each, Send)]
    return b"".join(each for each in frames if isinstance(each, bytes))


async def _stay(port: int, count: int) -> None:
    few = asyncio.Semaphore(JOINING_AT_ONCE)

    async def joined(number: int) -> tuple[asyncio.StreamWriter, bytes]:
        async with few:
            _, writer, beat = await join(port, f"{os.getpid()}-{number}")
            return writer, beat

    workers = await asyncio.gather(*map(joined, range(count)))
    print(json.dumps({"joined": count}), flush=True)
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        for writer, beat in workers:
            writer.write(beat)
            due += HEARTBEAT_EVERY / count
            await asyncio.sleep(due - loop.time())


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stay(int(sys.argv[1]), int(sys.argv[2])))
