"""A client of ``GET /admin/live``, which applies what it reads as the page does."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientResponse

from gateway.serving import KEY, Pool


@dataclass(slots=True)
class LivePage:
    """The state that a page has, and the names and data of all events."""

    response: ClientResponse
    heard: list[tuple[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    workers: dict[str, Any] = field(default_factory=dict)
    activity: dict[str, Any] = field(default_factory=dict)
    rate: dict[str, float] = field(default_factory=dict)
    facts: list[Any] = field(default_factory=list)
    ended: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.heard]

    async def read(self) -> None:
        text = ""
        async for data in self.response.content.iter_any():
            text += data.decode()
            *whole, text = text.split("\n\n")
            for each in whole:
                if each.startswith("event: "):
                    self._apply(each)
        self.ended = True

    def _apply(self, event: str) -> None:
        first, _, second = event.partition("\n")
        name, data = first.removeprefix("event: "), second.removeprefix("data: ")
        value = json.loads(data)
        self.heard.append((name, value))
        match name:
            case "snapshot":
                self.status = value["status"]
                self.workers = {each["id"]: each for each in value["status"]["workers"]}
                self.activity, self.rate = value["activity"], value["rate"]
            case "changes":
                self.status |= value["status"]
                _update(self.workers, value["workers"])
                _update(self.activity, value["activity"])
                self.rate = value["rate"]
            case "facts":
                self.facts += value
            case _:
                pass


def _update(state: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if value is None:
            del state[key]
        else:
            state[key] = value


@asynccontextmanager
async def live(pool: Pool, key: str = KEY) -> AsyncIterator[LivePage]:
    """Listen within the block; without a key, as the session's browser."""
    headers = pool.headers(key) if key else {"Sec-Fetch-Site": "same-origin"}
    async with pool.session.get(f"{pool.url}/admin/live", headers=headers) as response:
        assert response.status == 200, await response.text()
        page = LivePage(response)
        reading = asyncio.create_task(page.read())
        try:
            yield page
        finally:
            reading.cancel()
