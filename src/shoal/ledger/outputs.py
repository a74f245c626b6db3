"""The output of a job, as the bytes that receipts hash."""

from collections.abc import Mapping

from shoal.domain.outcome import Outcome
from shoal.domain.work import (
    JSON,
    Call,
    CallStream,
    Chat,
    Completion,
    Embedding,
    Rerank,
    Task,
    Transcription,
    Work,
)
from shoal.ledger.canonical import EXACT_MAX, encode, without_surrogates


def output_of(work: Work, outcome: Outcome) -> bytes:
    """Return a job's output as JSON text in UTF-8.

    It is the worker's own text, where its wire has a form for it; else canonical JSON
    (RFC 8785) with the ``text`` and the ``model``, and the ``choices`` if the answer is
    more than its text.  Integers beyond 2**53 in those are written as strings.
    """
    if outcome.output:
        return outcome.output.encode()
    match work:
        case Call() | CallStream():
            # The value is the result, so the receipt is about its digest.
            return outcome.value
        case Task():
            return without_surrogates(outcome.text).encode()
        case (
            Chat(model=model)
            | Completion(model=model)
            | Embedding(model=model)
            | Rerank(model=model)
            | Transcription(model=model)
        ):
            output: dict[str, JSON] = {
                "model": model,
                "text": without_surrogates(outcome.text),
            }
            if outcome.choices:
                output["choices"] = [
                    _canonical(
                        {
                            "fields": choice.fields,
                            "finish_reason": choice.finish_reason,
                            "logprobs": choice.logprobs,
                        }
                    )
                    for choice in outcome.choices
                ]
            return encode(output)


def _canonical(value: JSON) -> JSON:
    match value:
        case str():
            return without_surrogates(value)
        case Mapping():
            return {
                without_surrogates(key): _canonical(each) for key, each in value.items()
            }
        case list() | tuple():
            return [_canonical(each) for each in value]
        case int() if abs(value) > EXACT_MAX:
            return str(value)  # too large for a canonical number
        case _:
            return value
