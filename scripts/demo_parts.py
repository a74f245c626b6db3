"""What the demonstrations have in common: a clock that talks, and streamed answers."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from random import Random

import openai

from shoal.cli.local.demo import DemoError, say

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
