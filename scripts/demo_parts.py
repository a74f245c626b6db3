"""What the demonstrations have in common: a clock that talks, and streamed answers."""

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import openai
import psutil

from shoal.cli.command_loop import Program, run_program
from shoal.cli.local.demo import DemoError, say
from shoal.client.coordinator import CoordinatorApi
from shoal.engines.gguf_files import demo_model_path

TOKEN, KEY = "demo-of-models", "sk-demo-of-models"

ANSWER_MAX = 80  # tokens
PATIENCE = 60.0  # seconds for what should happen
PAUSE = 0.05  # seconds between looks whether it has
PORTS = range(10_000, 20_000)  # below those that the system gives to programs


class Clock:
    """Prints what happens, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        say(f"{time.monotonic() - self._begin:5.1f} s  {text}", style)


class Answer:
    """An answer that streams through a coordinator, read in a thread."""

    def __init__(self, client: openai.OpenAI, model: str, node: str, ask: str) -> None:
        self.node = node
        self.pieces = 0
        self.tokens = 0
        self.longest_pause = 0.0  # seconds between two pieces
        self.finish_reason: str | None = None
        self._error: Exception | None = None
        self._client, self._model, self._ask = client, model, ask
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it has ended.  Raises DemoError if it is not whole."""
        self._thread.join(PATIENCE)
        if self._error is not None or self.finish_reason is None:
            raise DemoError(
                f"the answer through the node {self.node} is not whole: {self._error}"
            )

    def _read(self) -> None:
        try:
            stream = self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": self._ask}],
                max_tokens=ANSWER_MAX,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            last = None
            for chunk in stream:
                if chunk.usage is not None:
                    self.tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason
                    if not choice.delta.content:
                        continue
                    now = time.monotonic()
                    if last is not None:
                        self.longest_pause = max(self.longest_pause, now - last)
                    last = now
                    self.pieces += 1
        except (openai.OpenAIError, OSError) as error:
            self._error = error


class DemoPool:
    """A coordinator and workers that have a model of some name, or load it."""

    def __init__(
        self, folder: Path, clock: Clock, model: str, stack: ExitStack
    ) -> None:
        """Start the coordinator; all programs end with ``stack``."""
        self._folder, self._clock, self._stack = folder, clock, stack
        self._model = model
        self._workers: dict[str, Program] = {}
        serve = ["serve", "--port", "0", "--data-dir", str(folder / "pool")]
        serve += ["--join-token", TOKEN, "--api-key", KEY, "--no-discovery"]
        coordinator = stack.enter_context(run_program("pool", serve, folder))
        self._url = coordinator.report["url"]
        clock.say(f"the coordinator serves {self._url}")
        self.api = CoordinatorApi(self._url, KEY, folder)
        self._client = stack.enter_context(
            openai.OpenAI(base_url=f"{self._url}/v1", api_key=KEY, max_retries=0)
        )

    def join(self, name: str, about: str, *options: str) -> None:
        """Start a worker."""
        join = ["join", self._url, "--token", TOKEN, "--name", name]
        join += ["--data-dir", str(self._folder / name), *options]
        self._workers[name] = self._stack.enter_context(
            run_program(name, join, self._folder)
        )
        self._clock.say(f"the worker {name} joined{about}")

    def file(self, name: str) -> Path:
        """Return where a worker has its own file of the model."""
        return self._folder / name / "models" / f"{self._model}.gguf"

    def add_file(self, name: str) -> None:
        """Give a worker the file, before it is started."""
        self.file(name).parent.mkdir(parents=True)
        shutil.copy(demo_model_path(), self.file(name))

    def replicas(self) -> list[dict[str, Any]]:
        """Return what the coordinator says of the machines that have the model."""
        listed: list[dict[str, Any]] = self.api.request("/admin/models")["data"]
        found = [each["replicas"] for each in listed if each["id"] == self._model]
        return [each for places in found for each in places]

    def ask(self, question: str) -> Answer:
        return Answer(self._client, self._model, "the pool", question)

    def finish(self, *answers: Answer) -> None:
        """Wait until answers have ended, whole."""
        for each in answers:
            each.wait()
            self._clock.say(
                f"an answer is whole: {each.tokens} tokens, the longest pause "
                f"{each.longest_pause:.1f} s",
                "green",
            )

    def kill(self, name: str, about: str = "") -> None:
        """Kill a worker, with all that it has started."""
        worker = psutil.Process(self._workers[name].process.pid)
        worker.suspend()  # it starts no other
        for each in (*worker.children(recursive=True), worker):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._clock.say(f"⟨{name} was killed{about}⟩", "red")


@contextmanager
def demo_pool(model: str) -> Iterator[tuple[DemoPool, Clock]]:
    """Run a coordinator in a folder of its own, for a block."""
    clock = Clock()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        yield DemoPool(folder, clock, model, stack), clock
        clock.say("No answer was lost, and nothing came from the internet.", "green")


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens on."""
    with ExitStack() as probes:
        found: list[int] = []
        for port in Random().sample(PORTS, 10 * count):
            with suppress(OSError):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
        return found[:count]


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds.  Raises DemoError if it does not."""
    latest = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > latest:
            raise DemoError(f"in vain: {what}")
        time.sleep(PAUSE)


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
