"""OpenAI's streamed chat chunk, as far as engines read it.

Source: OpenAI API reference, "chat.completion.chunk".  Fields that are not named here
are skipped.  llama.cpp and most servers send an error in place of a chunk.
"""

from typing import Any

import msgspec

from shoal.domain.errors import JobError

TOKENS_MAX = 2**31 - 1
ERROR_MAX = 500  # characters of another program's message that are passed on


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    delta: Delta = Delta()
    finish_reason: str | None = None


class Tokens(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def plausible(self) -> bool:
        """Whether these can be counts, which wires refuse if they cannot."""
        return all(
            0 <= n <= TOKENS_MAX for n in (self.prompt_tokens, self.completion_tokens)
        )


class Problem(msgspec.Struct, frozen=True):
    message: str = "no message"


class Chunk(msgspec.Struct, frozen=True):
    """A piece of the answer, its usage, or why there is no more of it."""

    choices: tuple[Choice, ...] = ()
    usage: Tokens | None = None
    error: Problem | str | None = None

    @property
    def text(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return next((c.finish_reason for c in self.choices if c.finish_reason), None)

    @property
    def problem(self) -> str | None:
        """The message of the error, shortened; None if this is no error."""
        match self.error:
            case None:
                return None
            case str() as message:
                return message[:ERROR_MAX]
            case Problem(message):
                return message[:ERROR_MAX]


def chunk_of(data: Any) -> Chunk:
    """Check a chunk that is decoded already.  Raises JobError if it is none."""
    try:
        return msgspec.convert(data, Chunk)
    except msgspec.ValidationError as error:
        raise JobError(f"not a chat chunk: {error}") from error
