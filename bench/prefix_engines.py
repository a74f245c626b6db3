"""Engines whose time to the first text is that of the prompt's tokens they must read.

As vLLM's, each keeps the blocks of prompts that it read last, and reads one prompt at a
time; answers are written at a steady pace beside it.  Prints the engines' ports.
"""

import asyncio
import json
import sys
from collections import OrderedDict

from aiohttp import web

from engine import FIRST, LAST, NEXT, models

CHARACTERS = 4  # of a token
BLOCK = 16 * CHARACTERS  # characters
KEPT = 60_000 * CHARACTERS // BLOCK  # blocks: sixteen long conversations
PACE = 4000.0  # tokens of a prompt that are read in a second
WRITTEN = 32  # chunks of an answer
EVERY = 0.01  # seconds


class Engine:
    """One engine, and the blocks in its cache."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._reading = asyncio.Lock()
        self.read = self.asked = 0  # blocks

    def take(self, prompt: str) -> int:
        """Put a prompt into the cache; return how many blocks have to be read."""
        missing, key = 0, 0
        for at in range(0, len(prompt), BLOCK):
            key = hash((key, prompt[at : at + BLOCK]))
            missing += key not in self._blocks
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        self.read += missing
        self.asked += -(-len(prompt) // BLOCK)
        return missing

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        prompt = "".join(f"{m['role']}:{m['content']}\n" for m in asked["messages"])
        async with self._reading:
            await asyncio.sleep(self.take(prompt) * BLOCK / CHARACTERS / PACE)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in (FIRST, *[NEXT] * (WRITTEN - 1)):
            await response.write(chunk)
            await asyncio.sleep(EVERY)
        await response.write_eof(LAST)
        return response

    async def counts(self, request: web.Request) -> web.Response:
        return web.json_response({"read": self.read, "asked": self.asked})


async def main(count: int) -> None:
    ports = []
    for _ in range(count):
        engine = Engine()
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/chat/completions", engine.chat),
                web.get("/v1/models", models),
                web.get("/health", models),
                web.get("/counts", engine.counts),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
    print(json.dumps({"ports": ports}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
