"""Tokens read and written, as OpenAI's answers tell them."""

import msgspec

from shoal.domain.credentials import usage_of
from shoal.domain.outcome import Outcome
from shoal.domain.work import Work


class CompletionUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def counted(work: Work, outcome: Outcome) -> CompletionUsage:
    """Return the usage in OpenAI's form."""
    usage = usage_of(work, outcome)
    total = usage.prompt_tokens + usage.completion_tokens
    return CompletionUsage(usage.prompt_tokens, usage.completion_tokens, total)
