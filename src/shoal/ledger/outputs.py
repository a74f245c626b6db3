"""The output of a job, as the bytes that receipts hash."""

from shoal.domain import work as works
from shoal.domain.outcome import Outcome
from shoal.ledger.canonical import encode_any, without_surrogates


def output_of(work: works.Work, outcome: Outcome) -> bytes:
    """Return a job's output as JSON text in UTF-8.

    It is the worker's own text, where its wire has a form for it; else canonical JSON
    (RFC 8785) with the ``text`` and the ``model``, and the ``choices`` if the answer is
    more than its text, with what ``encode_any`` replaces.
    """
    if outcome.output:
        return outcome.output.encode()
    match work:
        case works.Call() | works.CallStream():
            # The value is the result, so the receipt is about its digest.
            return outcome.value
        case works.Task():
            return without_surrogates(outcome.text).encode()
        case (
            works.Chat(model=model)
            | works.Completion(model=model)
            | works.Embedding(model=model)
            | works.Rerank(model=model)
            | works.Transcription(model=model)
        ):
            output: dict[str, works.JSON] = {"model": model, "text": outcome.text}
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
