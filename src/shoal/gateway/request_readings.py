"""What a body may ask for, in each dialect that can read it.

For clients that verify a receipt with the request that they sent: the hash in the
receipt says which of the readings is the right one.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from shoal.domain.errors import ClientError
from shoal.domain.job import Policy
from shoal.domain.work import Chat, Completion, Embedding, Work
from shoal.gateway.anthropic.message_request import decode_message_request
from shoal.gateway.batches.lines import decode_line
from shoal.gateway.jobs.job_request import decode_commit
from shoal.gateway.ollama.embeddings import decode_embed, decode_embed_one
from shoal.gateway.ollama.models import LATEST
from shoal.gateway.ollama.requests import (
    ModelLoad,
    OllamaRequest,
    decode_ollama_chat,
    decode_ollama_prompt,
)
from shoal.gateway.openai.chat_request import decode_chat_request
from shoal.gateway.openai.completion_request import decode_completion_request
from shoal.gateway.openai.embeddings import decode_embedding_request
from shoal.gateway.openai.rerank import decode_rerank_request
from shoal.gateway.responses.request import decode_response_request
from shoal.ledger.prices import PriceList


def works_of(body: bytes) -> Iterator[Work]:
    """Yield the works that a body may mean; also the line of a batch that has it.

    Not those that depend on more than the body: on earlier responses, on the texts of
    token ids, or on a file.
    """
    with suppress(ClientError):
        body = bytes(decode_line(body).body)
    for decode in _DECODERS:
        with suppress(ClientError):  # it is of another dialect
            yield from decode(body)


def _embedding(body: bytes) -> Iterator[Work]:
    asked = decode_embedding_request(body)
    if not asked.tokens:
        yield asked.work(())


def _response(body: bytes) -> Iterator[Work]:
    asked = decode_response_request(body, created=0)
    if not (asked.references or asked.fields.previous_response_id):
        yield asked.chat()


def _ollama(asked: OllamaRequest) -> Iterator[Work]:
    if not isinstance(asked, ModelLoad):
        yield from _named(asked.work)


def _named(work: Chat | Completion | Embedding | None) -> Iterator[Work]:
    """Yield work by both names that its model may have in a pool."""
    if work is not None:
        bare = work.model.removesuffix(LATEST)
        yield from (replace(work, model=name) for name in (bare, bare + LATEST))


_DECODERS: tuple[Callable[[bytes], Iterator[Work]], ...] = (
    lambda body: iter([decode_chat_request(body).work]),
    lambda body: iter([decode_completion_request(body).work]),
    lambda body: iter([decode_message_request(body).generation.work]),
    lambda body: iter([decode_rerank_request(body).work]),
    lambda body: iter([decode_commit(body, Policy.FAST, PriceList())[0]]),
    lambda body: _ollama(decode_ollama_chat(body)),
    lambda body: _ollama(decode_ollama_prompt(body)),
    lambda body: _named(decode_embed(body).work),
    lambda body: _named(decode_embed_one(body).work),
    _embedding,
    _response,
)
