"""GrandSage's original programs, as far as their wire goes, without I/O.

Written from the notes on the wire alone, without any of our own codecs, so that both
can be wrong only apart.  A token is a word here.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ID = struct.Struct("!I")
RESERVE = 50  # tokens that a node keeps free
SERVER_WAIT = 600.0  # seconds until the server gives up a task


def tokens(text: str) -> int:
    return len(text.split())


@dataclass
class ServerTask:
    """A server's record of a task, which it keeps until the node ends it."""

    id: int
    text: str = ""
    done: bool = False


@dataclass
class OriginalServer:
    """The API server, with one node.

    A record outlives the node's connection: without an end frame the client waits, and
    the slot is taken, for ``SERVER_WAIT``.
    """

    slots: int = 1
    tasks: dict[int, ServerTask] = field(default_factory=dict)
    _next_id: int = 1_000

    @property
    def taken(self) -> int:
        return sum(not task.done for task in self.tasks.values())

    def submit(
        self,
        messages: Sequence[dict[str, str]],
        max_new_tokens: int = 50,
        system: str = "You are a helpful assistant name Buddy.",
    ) -> tuple[ServerTask, str]:
        """Return a task and the text that is sent to the node."""
        assert self.taken < self.slots, "the client gets: timeout waiting for node"
        task = ServerTask(self._next_id)
        self._next_id += 1
        self.tasks[task.id] = task
        sent = {
            "state": 0,
            "id": task.id,
            "resp": "",
            "modLastCheckedPos": 0,
            "system": system,
            "messages": messages,
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
            "created_at": 1_700_000_000,
            "user": {"token": "-", "name": "alice"},
        }
        return task, json.dumps(sent, separators=(",", ":"))

    def receive(self, frame: str | bytes) -> list[str]:
        """Process a frame of the node; return the texts that are sent back."""
        if isinstance(frame, str):
            return []  # a keepalive; any other text is logged
        assert len(frame) >= ID.size, "the server process exits"
        (task_id,) = ID.unpack_from(frame)
        task = self.tasks.get(task_id)
        text = frame[ID.size :].decode(errors="replace")
        if task is None or task.done:
            return [json.dumps({"id": task_id, "stop": True})] if text else []
        task.text += text
        task.done = not text
        return []


@dataclass
class _NodeTask:
    id: int
    answer: list[str]


@dataclass
class VllmNode:
    """The vLLM node: runs one step of all tasks at a time, a word each.

    It says nothing of a task that it cannot run: one with an empty conversation, or one
    whose system text and token limit leave no room in the context.
    """

    answer: str = "One two three"
    context: int = 4096
    running: dict[int, _NodeTask] = field(default_factory=dict)
    prompts: list[list[str]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def receive(self, text: str) -> None:
        task: dict[str, Any] = json.loads(text)
        if "stop" in task:
            self.running.pop(task["id"], None)
            return
        limit = task["max_new_tokens"]
        assert limit >= 1, "the node process exits"
        room = self.context - RESERVE - limit - tokens(task["system"])
        if not task["messages"] or room < 0:
            self.dropped.append(task["id"])
            return
        kept: list[str] = []
        for message in reversed(task["messages"]):
            room -= tokens(message["content"])
            if kept and room < 0:
                break  # the oldest messages go
            kept.insert(0, message["content"])
        self.prompts.append(kept)
        words = self.answer.split()[:limit]
        pieces = [f" {word}" if at else word for at, word in enumerate(words)]
        self.running[task["id"]] = _NodeTask(task["id"], pieces)

    def step(self) -> list[bytes]:
        """Generate a word of each running task; return the frames."""
        frames = []
        for task in list(self.running.values()):
            piece = task.answer.pop(0) if task.answer else ""
            frames.append(ID.pack(task.id) + piece.encode())
            if not piece:
                del self.running[task.id]
        return frames

    def finish(self) -> list[bytes]:
        """Generate until no task runs; return the frames."""
        frames = []
        while self.running:
            frames += self.step()
        return frames
