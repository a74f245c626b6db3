"""OpenAI's streamed chunk of a chat or a completion, as far as engines need it.

Source: OpenAI API reference, "The chat completion chunk object" and "The completion
object".  Undeclared fields are skipped, except those of a chat's delta, which are
passed on.
"""

from typing import Annotated, Any

import msgspec

from shoal.domain.answer_assembly import CHOICES_MAX, describe_invalid_fields
from shoal.domain.errors import JobError
from shoal.domain.outcome import AnswerPiece, Delta, Usage

TOKENS_MAX = 2**31 - 1
ERROR_MAX = 500  # characters of a server's message that are passed on

REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})

# Finish reasons of vLLM and SGLang for aborted answers.
ABORTED = frozenset({"abort", "error"})


class StreamChoice(msgspec.Struct, frozen=True):
    """The part of a chunk for one choice: ``delta`` in a chat, else ``text``."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=CHOICES_MAX)] = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: Any = None
    finish_reason: str | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def plausible(self) -> bool:
        """Whether these are valid counts, which wires require."""
        return all(
            0 <= n <= TOKENS_MAX for n in (self.prompt_tokens, self.completion_tokens)
        )


class ServerProblem(msgspec.Struct, frozen=True):
    """An error in OpenAI's form; servers vary in their values."""

    message: str = "no message"
    code: Any = None
    type: Any = None
    param: Any = None


class StreamChunk(msgspec.Struct, frozen=True):
    """A piece of the answer, its usage, or an error."""

    choices: tuple[StreamChoice, ...] = ()
    usage: StreamUsage | None = None
    error: ServerProblem | str | None = None
    object: Any = None  # "error" where an older vLLM has one

    @property
    def is_error(self) -> bool:
        """Whether this is an error."""
        return self.error is not None or self.object == "error"


class UsageTally:
    """Counts the tokens of an answer with ``choices`` to each of its ``prompts``."""

    def __init__(self, choices: int = 1, prompts: int = 1) -> None:
        self._choices = choices
        self._expected = choices * prompts
        self._counts: list[StreamUsage] = []

    def add(self, tokens: StreamUsage) -> None:
        """Record the server's counts, if they are plausible."""
        if tokens.plausible and len(self._counts) < CHOICES_MAX:
            self._counts.append(tokens)

    def usage(self) -> Usage | None:
        """Return the tokens of all choices, as far as reported."""
        if not self._counts:
            return None
        if len(self._counts) != self._expected or self._expected == 1:
            last = self._counts[-1]
            return Usage(last.prompt_tokens, last.completion_tokens)
        # llama.cpp counts each choice separately, each including the prompt.
        read = sum(each.prompt_tokens for each in self._counts)
        written = sum(each.completion_tokens for each in self._counts)
        return Usage(read // self._choices, written)


def piece_from_choice(choice: StreamChoice, several: bool) -> AnswerPiece | None:
    """Return the piece that a choice adds to the answer; None if none.

    With ``several`` choices, each has its own finish reason.

    Raises JobError if the text is invalid.
    """
    delta, reason = choice.delta, choice.finish_reason if several else None
    if delta is None:
        delta = {"content": choice.text}
    if (fault := describe_invalid_fields(delta)) is not None:
        raise JobError(f"the server sent {fault}")
    text: str | None = delta.get("content")
    simple = choice.logprobs is None and not several and choice.index == 0
    if simple and text and len(delta) == 1:
        return text
    fields = {
        name: value
        for name, value in delta.items()
        if name != "role" and value is not None and value != "" and value != []
    }
    if simple and text and len(fields) == 1:
        return text
    if not fields and choice.logprobs is None and reason is None:
        return None
    return Delta(choice.index, fields, choice.logprobs, known_finish_reason(reason))


def known_finish_reason(reason: str | None) -> str | None:
    """Return the finish reason, if it is one that clients know."""
    return reason if reason is None or reason in REASONS else "stop"
