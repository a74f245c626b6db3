"""Frame times of the dashboard with 1,000 workers and 10,000 jobs.

*pool*: the picture of the machines, for eight seconds, while half of them change each
second.  *jobs*: scrolling through the list with all jobs loaded.  A frame of a screen
with 60 Hz takes 16.7 ms.  The page runs in Chromium without a window, which draws on
the processor; its data come from a small server of the bench.
"""

import asyncio
import json
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from report import Goal, Results
from shoal.gateway.dashboard import SECURITY_HEADERS, dashboard_files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from browser.chromium import browser

ROUNDS = 3
WORKERS = 1_000
JOBS = 10_000
SECONDS = 8  # for which frames are counted
MODELS = ("qwen3-8b", "llama-3.3-70b", "gemma-3-12b", "nomic-embed-text")

POOL, POOL_WORST = "pool, median frame: ms", "pool, 99th percentile: ms"
LIST, LIST_WORST = "jobs, median frame: ms", "jobs, 99th percentile: ms"
LOADED = "jobs, 10,000 loaded: s"
GOALS = [Goal(POOL, at_most=17), Goal(POOL_WORST, at_most=50), Goal(LIST, at_most=17)]

FRAMES = """(seconds) => new Promise((done) => {
  const frames = [];
  let last = performance.now();
  const end = last + seconds * 1000;
  const frame = (at) => {
    frames.push(at - last);
    last = at;
    if (window.scrolls) scrollBy(0, 120);
    if (at < end) requestAnimationFrame(frame); else done(frames.slice(2));
  };
  requestAnimationFrame(frame);
})"""
LOAD_ALL = """async (wanted) => {
  const rows = () => +document.querySelector("table").getAttribute("aria-rowcount") - 1;
  while (rows() < wanted) {
    scrollTo(0, document.body.scrollHeight);
    await new Promise((done) => setTimeout(done, 20));
  }
  scrollTo(0, 0);
  window.scrolls = true;
}"""


def measure(rounds: int) -> Results:
    results: Results = {row: [] for row in (POOL, POOL_WORST, LIST, LIST_WORST, LOADED)}
    served = threading.Event()
    server = _Server(served)
    threading.Thread(target=server.run, daemon=True).start()
    served.wait()
    with browser() as engine:
        for _ in range(rounds):
            page = engine.new_page(viewport={"width": 1280, "height": 800})
            page.goto(f"{server.url}/#/pool")
            page.locator(".cells button").nth(WORKERS - 1).wait_for()
            _add(results, POOL, POOL_WORST, page.evaluate(FRAMES, SECONDS))
            page.goto(f"{server.url}/#/jobs")
            page.locator("tbody tr").first.wait_for()
            began = time.perf_counter()
            page.evaluate(LOAD_ALL, JOBS)
            results[LOADED].append(time.perf_counter() - began)
            _add(results, LIST, LIST_WORST, page.evaluate(FRAMES, SECONDS))
            page.close()
    return results


def _add(results: Results, median: str, worst: str, frames: list[float]) -> None:
    results[median].append(statistics.median(frames))
    results[worst].append(sorted(frames)[len(frames) * 99 // 100])


class _Server:
    """Serves the page, and a pool that is made up."""

    def __init__(self, served: threading.Event) -> None:
        self.url = ""
        self._served = served
        self._random = Random(20)
        self._workers = [_worker(n, self._random) for n in range(WORKERS)]
        self._jobs = [_job(n) for n in range(JOBS)]

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/admin/live", self._live)
        app.router.add_get("/admin/jobs", self._list_jobs)
        app.router.add_get("/{path:.*}", self._show)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._served.set()
        await asyncio.Event().wait()

    async def _show(self, request: web.Request) -> web.Response:
        path = request.path.removeprefix("/dashboard/").lstrip("/") or "index.html"
        if path == "session":
            return web.json_response(
                {"name": "bench", "scope": "monitor", "expires_at": None}
            )
        file = dashboard_files().get(path)
        if file is None:
            return web.json_response({"data": [], "next": None})
        headers = SECURITY_HEADERS | {"Content-Type": file.media}
        return web.Response(body=file.body, headers=headers)

    async def _list_jobs(self, request: web.Request) -> web.Response:
        first, limit = int(request.query.get("before", -1)) + 1, 200
        page = self._jobs[first : first + limit]
        more = page[-1]["id"] if first + limit < JOBS else None
        return web.json_response({"data": page, "next": more})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        activity = {each["id"]: self._activity(each) for each in self._workers}
        await self._send(response, "snapshot", self._status(), activity)
        with suppress(ConnectionError):  # the page was closed
            await self._stream(response)
        return response

    async def _stream(self, response: web.StreamResponse) -> None:
        while True:
            await asyncio.sleep(1)
            changed = self._random.sample(self._workers, WORKERS // 2)
            for each in changed:
                each["busy"] = self._random.randint(0, each["slots"])
                each["cpu"] = self._random.uniform(1, 99)
            activity = {each["id"]: self._activity(each) for each in changed}
            workers = {each["id"]: each for each in changed}
            await self._send(response, "changes", None, activity, workers)

    async def _send(
        self,
        response: web.StreamResponse,
        event: str,
        status: Any,
        activity: Any,
        workers: Any = None,
    ) -> None:
        rate = {"tokens_per_second": 20_000.0, "jobs_per_second": 40.0}
        data: dict[str, Any] = {"at": time.time(), "activity": activity, "rate": rate}
        if status is not None:
            data["status"] = status
        if workers is not None:
            data["workers"] = workers
        await response.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())

    def _activity(self, worker: dict[str, Any]) -> dict[str, Any]:
        busy = worker["busy"]
        speed = busy * self._random.uniform(10, 40)
        return {"jobs": [f"{n:032x}" for n in range(busy)], "tokens_per_second": speed}

    def _status(self) -> dict[str, Any]:
        return {
            "version": "bench",
            "started_at": time.time(),
            "ready": True,
            "why_not": "",
            "models": [*MODELS],
            "workers": self._workers,
            "jobs": {"queued": 0, "running": WORKERS},
            **{name: [] for name in ("nodes", "peers", "refused", "orders", "relays")},
            "unencrypted": {},
        }


def _worker(number: int, random: Random) -> dict[str, Any]:
    name = f"node-{number:04}"
    return {
        "id": f"tealenet:{name}/{MODELS[number % 4]}",
        "models": [MODELS[number % 4]],
        "slots": 4,
        "busy": random.randint(0, 4),
        **{"kinds": ["chat"], "features": [], "tasks": [], "only_for": []},
        **{"draining": "", "suspension": None, "unfit": "", "remark": "", "price": ""},
        **{"points": 0, "queued": 0, "speed": 1.0, "throttle": 100, "context": 8192},
        **{"thermal": "nominal", "temperature": 50.0, "cpu": 10.0, "memory": 40.0},
        **{"public_key": f"{number:064x}", "proven": True, "tokens_per_second": 30.0},
        **{"peer": None, "peer_name": name, "protection": "noise", "device": "gpu"},
        "connected_at": time.time() - number,
    }


def _job(number: int) -> dict[str, Any]:
    at = time.time() - number
    return {
        "id": str(number),
        "state": "done",
        "kind": "chat",
        "model": MODELS[number % 4],
        "owner": "bench",
        "priority": "normal",
        "attempts": 1,
        "submitted_at": at,
        "ended_at": at + 0.9,
        "error": None,
    }
