"""A hub of models on 127.0.0.1, as Hugging Face's API is documented."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "a" * 40
GATED = "org/gated"


@dataclass(slots=True)
class HubServer:
    """Repositories by name, each with its files; and what was asked for.

    ``cut_after``: the next download ends after so many bytes.  ``damaged``: files
    arrive with another first byte.  ``claimed_size`` is told of each file, and
    ``downloads`` are the files that were sent, of the ``revisions``, ``sent`` the bytes
    of them, and ``seconds`` how long each request takes.  ``gone``: no file is sent.
    ``tokens`` are those that came, as they are in the header.
    """

    repositories: Mapping[str, Mapping[str, bytes]] = field(repr=False)
    cut_after: int | None = None
    damaged: bool = False
    claimed_size: int | None = None
    ranges: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)  # files
    revisions: list[str] = field(default_factory=list)  # of these
    seconds: float = 0.0
    gone: bool = False
    sent: int = 0
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    async def about(self, request: web.Request) -> web.Response:
        self._note_token(request)
        name = request.match_info["repository"]
        if name == GATED:
            headers = {"X-Error-Code": "GatedRepo"}
            return web.json_response({"error": "gated"}, status=403, headers=headers)
        if name not in self.repositories:
            headers = {"X-Error-Code": "RepoNotFound"}
            return web.json_response({"error": "none"}, status=404, headers=headers)
        siblings = [
            {
                "rfilename": file,
                "size": self.claimed_size or len(data),
                "blobId": "b" * 40,
                "lfs": {"sha256": digest(data), "size": len(data), "pointerSize": 134},
            }
            for file, data in self.repositories[name].items()
        ]
        return web.json_response({"id": name, "sha": COMMIT, "siblings": siblings})

    async def search(self, request: web.Request) -> web.Response:
        assert request.query["filter"] == "gguf"
        text = request.query["search"].lower()
        found = [{"id": name} for name in self.repositories if text in name.lower()]
        return web.json_response(found)

    async def file(self, request: web.Request) -> web.StreamResponse:
        self._note_token(request)
        if self.gone:
            raise web.HTTPForbidden  # which its library does not repeat
        data = self.repositories[request.match_info["repository"]][
            request.match_info["file"]
        ]
        headers = {
            "ETag": f'"{digest(data)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if self.damaged:
            data = b"?" + data[1:]
        if request.method == "HEAD":
            headers["Content-Length"] = str(len(data))
            return web.Response(headers=headers)
        self.downloads.append(request.match_info["file"])
        self.revisions.append(request.match_info["revision"])
        begin = 0
        status, size = 200, len(data)
        if found := re.fullmatch(
            r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")
        ):
            self.ranges.append(found[0])
            status, begin, end = 206, int(found[1]), int(found[2] or size - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{size}"
            data = data[: end + 1]
        await asyncio.sleep(self.seconds)
        self.sent += len(data) - begin
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = len(data) - begin
        await response.prepare(request)
        if self.cut_after is not None:
            await response.write(data[begin : begin + self.cut_after])
            self.cut_after = None
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(data[begin:])
        await response.write_eof()
        return response

    def _note_token(self, request: web.Request) -> None:
        if found := request.headers.get("Authorization"):
            self.tokens.add(found)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@asynccontextmanager
async def serving(hub: HubServer) -> AsyncIterator[HubServer]:
    """Serve a hub; its ``url`` is set."""
    app = web.Application()
    app.router.add_get("/api/models", hub.search)
    app.router.add_get(r"/api/models/{repository:[^/]+/[^/]+}", hub.about)
    app.router.add_get(
        r"/api/models/{repository:[^/]+/[^/]+}/revision/{revision}", hub.about
    )
    app.router.add_get(
        r"/{repository:[^/]+/[^/]+}/resolve/{revision}/{file:.+}", hub.file
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        hub.url = f"http://{host}:{port}"
        yield hub
    finally:
        await runner.cleanup()
