"""The output of a job, as the bytes that receipts hash."""

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
from shoal.ledger.canonical import encode_any, without_surrogates


def output_of(work: Work, outcome: Outcome) -> bytes:
    """Return a job's output as JSON text in UTF-8.

    It is the worker's own text, where its wire has a form for it; else canonical JSON
    (RFC 8785) with the ``text`` and the ``model``, and the ``choices`` if the answer is
    more than its text, with what ``encode_any`` replaces.
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
            output: dict[str, JSON] = {"model": model, "text": outcome.text}
            if outcome.choices:
                output["choices"] = [
                    {
                        "fields": choice.fields,
                        "finish_reason": choice.finish_reason,
                        "logprobs": choice.logprobs,
                    }
                    for choice in outcome.choices
                ]
            return encode_any(output)
