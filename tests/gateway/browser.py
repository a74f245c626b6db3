"""A browser, as far as the coordinator sees one: its cookies and its headers."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientResponse, ClientSession, CookieJar

from gateway.serving import KEY
from shoal.gateway.http.browser_sessions import PAGE_HEADER

SESSION = "/dashboard/session"
LINKS = "/dashboard/links"


@dataclass(slots=True)
class Browser:
    """A browser with one page of the coordinator."""

    url: str
    session: ClientSession

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        page_header: bool = True,
    ) -> tuple[int, Any]:
        """Send a request of the page; return the status and the JSON of the answer."""
        sent = {"Origin": self.url, "Sec-Fetch-Site": "same-origin"}
        if page_header:
            sent[PAGE_HEADER] = "1"
        if method == "GET":
            del sent["Origin"]
        async with self.session.request(
            method, self.url + path, json=body, headers=sent | dict(headers or {})
        ) as response:
            return response.status, await _json(response)

    async def sign_in(self, key: str = KEY) -> Any:
        """Sign in by a key; return what the page learns."""
        status, shown = await self.send("POST", SESSION, {"api_key": key})
        assert status == 200, shown
        return shown

    async def sign_out(self) -> None:
        assert (await self.send("DELETE", SESSION))[0] == 204

    async def status(self, path: str = SESSION) -> int:
        """Return the status of a GET."""
        return (await self.send("GET", path))[0]

    @property
    def cookie(self) -> str:
        """The header ``Cookie`` that it sends."""
        return "; ".join(f"{each.key}={each.value}" for each in self.session.cookie_jar)


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Browser]:
    """Open a browser without cookies within the block."""
    async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
        yield Browser(url, session)


async def status_with(url: str, cookie: str) -> int:
    """Return the status that a session's cookie gets from a new browser."""
    async with browsing(url) as browser:
        status, _ = await browser.send("GET", SESSION, headers={"Cookie": cookie})
        return status


async def _json(response: ClientResponse) -> Any:
    return await response.json() if response.status != 204 else None
