"""Real ``shoal`` processes, and a model server that pauses on request."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from harness.fork_server import started
from harness.plain_http import NO_CERTIFICATES
from harness.slow_imports import openai
from harness.speed import scaled
from models.tiny_answers import ANSWERS
from shoal.domain.work import message_text

TESTS = Path(__file__).parents[1]
TINY = TESTS / "models" / "tiny.gguf"
PATIENCE = scaled(60.0)  # seconds until what should happen is taken not to
TOKEN = "9f2c71d4e8a6b03597c1d5e2"
PRICES = (
    *("--price-fast-inference", "0.01", "--price-fast-task", "0.003"),
    *("--price-cheap-inference", "0.005", "--price-cheap-task", "0.001"),
)
"""Flags of a coordinator whose jobs are not free."""
KEY = "sk-live-uZ5kq2Xv8RbN4tYw7Hc3"


class Program:
    """A process, of ``shoal`` or another module; what it prints is read as it comes."""

    def __init__(self, folder: Path, *arguments: str, module: str = "shoal") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = arguments[0] if module == "shoal" else module
        self._log = folder / f"{name}-{time.monotonic_ns()}.log"
        self._lines: queue.Queue[str | None] = queue.Queue()
        environment = dict(os.environ)
        if name in ("join", "throttle"):
            # Its key does not belong into the folder of whoever runs the tests.
            environment.setdefault("SHOAL_DATA_DIR", str(folder / "worker"))
        place = os.getcwd() if module == "shoal" else str(TESTS)
        with self._log.open("w") as errors:
            self.process = started(module, arguments, place, environment, errors)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    @property
    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()

    def line(self) -> str | None:
        """Return the next line of standard output, or None at its end."""
        try:
            return self._lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"no output; log:\n{self.errors}") from None

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event of this name; return it."""
        while (line := self.line()) is not None:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        raise AssertionError(f"it ended without {name!r}; log:\n{self.errors}")

    def terminate(self) -> int:
        """Send SIGTERM; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reading.join()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Programs:
    """Starts programs and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Program] = []

    @property
    def data(self) -> Path:
        """The data folder of the coordinators."""
        return self.folder / "data"

    def run(self, *arguments: str, module: str = "shoal") -> Program:
        program = Program(self.folder, *arguments, module=module)
        self._all.append(program)
        return program

    def start(self, *flags: str, port: int = 0) -> Program:
        """Start a coordinator, which is not ready yet."""
        data = ("--data-dir", str(self.data), "--log-level", "warning")
        secrets = ("--api-key", KEY, "--join-token", TOKEN)
        return self.run("serve", "--json", "--port", str(port), *data, *secrets, *flags)

    def serve(self, *flags: str, port: int = 0) -> "Pool":
        program = self.start(*flags, port=port)
        return Pool(self, program, program.event("ready"))

    def close(self) -> None:
        for program in self._all:
            program.process.kill()  # all of them, before any is waited for
        for program in self._all:
            program.close()


class Pool:
    """A running coordinator, with a user's actions."""

    def __init__(
        self, programs: Programs, program: Program, ready: dict[str, Any]
    ) -> None:
        self.program = program
        self.ready = ready
        self.url: str = ready["url"]
        self.port: int = ready["ports"]["http"]
        self._programs = programs

    def join(self, name: str, *flags: str, token: str = TOKEN) -> Program:
        flags = flags or ("--model", f"tiny={TINY}")
        return self._programs.run(
            "join", self.url, "--json", "--name", name, "--token", token, *flags
        )

    def signing(self, seed: str, *flags: str) -> Program:
        """Start a Dispatch worker of another program."""
        flags = (self.url, seed, "--token", TOKEN, *flags)
        return self._programs.run(*flags, module="live.signing_worker")

    def joined(self, name: str, *flags: str) -> Program:
        worker = self.join(name, *flags)
        worker.event("joined")
        return worker

    @contextmanager
    def client(self) -> "Iterator[openai.OpenAI]":
        with openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=KEY,
            max_retries=0,
            timeout=PATIENCE,
            http_client=openai.DefaultHttpxClient(verify=NO_CERTIFICATES),
        ) as client:
            yield client

    @contextmanager
    def posting(self, path: str, body: Any) -> Iterator[Iterator[str]]:
        """Post JSON; yield the lines of the answer as they arrive."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        with urlopen(Request(self.url + path, data, headers), timeout=PATIENCE) as got:
            yield (line.decode().rstrip("\n") for line in got)

    def admin(self, path: str) -> Any:
        with self.client() as client:
            return client.get(f"{self.url}/admin/{path}", cast_to=object)

    def put(self, path: str, body: object) -> Any:
        with self.client() as client:
            return client.put(f"{self.url}/{path}", cast_to=object, body=body)

    def delete(self, path: str) -> Any:
        with self.client() as client:
            return client.delete(f"{self.url}/{path}", cast_to=object)

    def workers(self) -> Sequence[dict[str, Any]]:
        workers: Sequence[dict[str, Any]] = self.admin("status")["workers"]
        return workers


def demonstrate(script: Path, *arguments: str) -> list[tuple[float, str]]:
    """Run a demonstration, which succeeds; return its lines, with the seconds."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parted = (each.split(" s  ", 1) for each in done.stdout.splitlines())
    return [(float(seconds), line) for seconds, line in parted]


@contextmanager
def answer_to(
    client: "openai.OpenAI", question: str, model: str = "tiny"
) -> Iterator[Any]:
    """Send a chat; return the stream of chunks."""
    with client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        stream=True,
    ) as stream:
        yield stream


def text_in(chunks: Any) -> Iterator[str]:
    """Yield the pieces of text in a stream of chunks."""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.delta.content:
                yield choice.delta.content


def eventually(
    condition: Callable[[], object], what: str, limit: float = PATIENCE
) -> None:
    """Wait until a condition holds; fail at the limit."""
    deadline, pause = time.monotonic() + limit, 0.02
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(pause)
        pause = min(1.1 * pause, 0.25)  # a long wait asks seldom: asking takes a core


class GatedModel:
    """A model server that knows the pairs, sends ``pause`` pieces, and waits.

    It stands for a model too slow to be done before a test has done its worst.
    ``pace``: seconds between pieces; ``names`` are those of its models.
    """

    def __init__(
        self,
        pause: int,
        pairs: Mapping[str, Sequence[str]] = ANSWERS,
        port: int = 0,
        *,
        pace: float = 0.0,
        names: Sequence[str] = ("tiny",),
    ) -> None:
        self.requests = 0
        self.traceparents: list[str] = []  # of the requests; empty: none was sent
        self._pairs = pairs
        self.go_on = threading.Event()
        self._pause = pause
        self._pace = pace
        self._names = names
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._serving = threading.Thread(
            target=self._server.serve_forever, args=(0.05,)
        )
        self._serving.start()

    @property
    def flags(self) -> tuple[str, str]:
        """The flags of a worker that runs this model."""
        return "--engine", f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._serving.join()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self._head("application/json")
                    listed = [{"id": name} for name in model._names]
                    self.wfile.write(json.dumps({"data": listed}).encode())
                else:
                    self._head("text/html")
                    self.wfile.write(b"<h1>Welcome</h1>")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                model.requests += 1
                model.traceparents.append(self.headers.get("traceparent", ""))
                self._head("text/event-stream")
                answer = model._pairs[message_text(body["messages"][-1])]
                for number, piece in enumerate(answer):
                    if number == model._pause:
                        model.go_on.wait(PATIENCE)
                    model.go_on.wait(model._pace)
                    self._send_chunk({"delta": {"content": piece}, "index": 0})
                if len(answer) == model._pause:
                    model.go_on.wait(PATIENCE)
                self._send_chunk({"delta": {}, "index": 0, "finish_reason": "stop"})
                usage = {"prompt_tokens": 1, "completion_tokens": len(answer)}
                self._write(_event({"choices": [], "usage": usage}))
                self._write(b"data: [DONE]\n\n")

            def _head(self, type_: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", type_)
                self.end_headers()

            def _send_chunk(self, choice: dict[str, Any]) -> None:
                self._write(_event({"choices": [choice]}))

            def _write(self, data: bytes) -> None:
                with suppress(ConnectionError):  # whoever asked was killed
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its children; it is stopped first, as it starts others."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


@contextmanager
def suspended(processes: list[psutil.Process]) -> Iterator[list[psutil.Process]]:
    """Stop processes for the length of the block; they may end in it."""
    for each in processes:
        each.suspend()
    try:
        yield processes
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.resume()
