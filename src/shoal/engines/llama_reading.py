"""Reads what llama.cpp calls back with, in the child process."""

import threading
from collections.abc import Callable
from typing import Any

import msgspec

from shoal.domain.outcome import Usage
from shoal.engines.chunks import Chunk, Problem, Tally, piece_of
from shoal.engines.llama_wire import Added, Ended, Refused, Run, ToEngine, Wrote


def problem_in(answer: Any) -> Problem | None:
    """Return the error in what llama.cpp answered, if it is one."""
    if isinstance(answer, dict) and "error" in answer:
        return msgspec.convert(answer["error"], Problem)
    return None


def refused(id: int, problem: Problem) -> Refused:
    code = problem.code
    return Refused(id, problem.message, code if isinstance(code, int) else 500)


class Reading:
    """Passes on what llama.cpp calls back with, and remembers how it ended."""

    def __init__(
        self, run: Run, abort: threading.Event, send: Callable[[ToEngine], None]
    ) -> None:
        choices = max(1, run.request.get("n") or 1)
        self._id = run.id
        self._abort = abort
        self._send = send
        self._several = choices * run.prompts > 1
        self._finish_reason: str | None = None
        self._tally = Tally(choices, run.prompts)
        self._refused: Refused | None = None

    def take(self, data: Any) -> bool:
        """Take a chunk; return whether to stop.

        llama.cpp's binding stops silently at an exception, so none is raised.
        """
        try:
            self._pass_on(data)
        except Exception as error:
            self._refused = Refused(self._id, str(error))
        return self._refused is not None or self._abort.is_set()

    def ended(self, begun: int) -> Ended | Refused:
        """Say how it ended; ``begun`` tokens of the prompt belong to the answer."""
        if self._refused is not None:
            return self._refused
        if self._finish_reason is None or self._abort.is_set():
            reason = "aborted" if self._abort.is_set() else "llama.cpp gave no answer"
            return Refused(self._id, reason)
        usage = self._tally.usage() or Usage(0, 0)
        prompt, written = usage.prompt_tokens, usage.completion_tokens
        return Ended(self._id, self._finish_reason, prompt - begun, written + begun)

    def _pass_on(self, data: Any) -> None:
        if data is None or self._abort.is_set():
            return  # it calls without a chunk when it reads several prompts
        if (problem := problem_in(data)) is not None:
            self._refused = refused(self._id, problem)
            return
        chunk = msgspec.convert(data, Chunk)
        if chunk.usage is not None:
            self._tally.add(chunk.usage)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            piece = piece_of(choice, self._several)
            if isinstance(piece, str):
                self._send(Wrote(self._id, piece))
            elif piece is not None:
                self._send(
                    Added(
                        self._id,
                        piece.choice,
                        dict(piece.fields),
                        piece.logprobs,
                        piece.finish_reason,
                    )
                )
