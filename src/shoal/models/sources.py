"""The peers that share models, and questions to all of them."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.domain.model_messages import ModelAnswer, ModelQuery, SendModelMessage

ANSWER_TIMEOUT = 5.0  # seconds for a peer to answer
REPEAT_AFTER = 2.0  # seconds until a question is repeated: a Mac may lose one
# Names that are asked for at a time.  A Shoal peer drops questions beyond 16.
NAMES_MAX = 8


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A connected peer that may share models; it is sent messages by ``send``.

    ``passed_on``: it serves this coordinator alone, which passes its models on to
    others in chunks.
    """

    name: str
    send: SendModelMessage
    passed_on: bool = False


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model at a peer; ``size`` is in bytes, approximate, and None if unknown."""

    source: ModelSource
    size: int | None


@dataclass(slots=True)
class _Question:
    """A question to one peer; ``askers`` wait for the same answer."""

    answer: "asyncio.Future[ModelAnswer | None]"  # None: the peer has left
    askers: int = 0


@dataclass(slots=True)
class ModelSources:
    """The connected peers that may share models.

    All methods belong to the event loop.
    """

    _sources: dict[str, ModelSource] = field(default_factory=dict)
    _questions: dict[tuple[str, str], _Question] = field(default_factory=dict)
    _names: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(NAMES_MAX)
    )

    @property
    def all(self) -> Collection[ModelSource]:
        """All sources."""
        return self._sources.values()

    def named(self, name: str) -> ModelSource | None:
        """Return a source that is connected."""
        return self._sources.get(name)

    def passes_on(self, name: str) -> bool:
        """Return whether the models of a peer are passed on to others."""
        source = self._sources.get(name)
        return source is not None and source.passed_on

    def add(self, source: ModelSource) -> None:
        """Add a peer; it replaces an older one of its name."""
        self._sources[source.name] = source

    def remove(self, name: str) -> None:
        """Remove a peer that has left; it answers nothing more."""
        self._sources.pop(name, None)
        for (peer, _), question in self._questions.items():
            if peer == name and not question.answer.done():
                question.answer.set_result(None)

    def receive(self, peer: str, answer: ModelAnswer) -> bool:
        """Process an answer, which may be late; return whether its peer is a source."""
        question = self._questions.get((peer, answer.model))
        if question is not None and not question.answer.done():
            question.answer.set_result(answer)
        return peer in self._sources

    async def find(
        self, model: str, among: Collection[ModelSource], *, first: bool = False
    ) -> Sequence[FoundModel]:
        """Ask peers for a model, within ``ANSWER_TIMEOUT``; return those that have it.

        ``first``: return as soon as one has it.
        """
        async with self._names:
            queries = {
                asyncio.ensure_future(self._ask(source, model)) for source in among
            }
            found: list[FoundModel] = []
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_TIMEOUT):
                        for answered in asyncio.as_completed(queries):
                            if (each := await answered) is None:
                                continue
                            found.append(each)
                            if first:
                                break
            finally:
                for task in queries:
                    task.cancel()
                await asyncio.gather(*queries, return_exceptions=True)
        return sorted(found, key=lambda each: each.source.name)

    async def _ask(self, source: ModelSource, model: str) -> FoundModel | None:
        key = source.name, model
        question = self._questions.get(key)
        if question is None:
            future = asyncio.get_running_loop().create_future()
            question = self._questions[key] = _Question(future)
            source.send(ModelQuery(model))
        question.askers += 1
        try:
            await asyncio.wait([question.answer], timeout=REPEAT_AFTER)
            if not question.answer.done():
                source.send(ModelQuery(model))
            answer = await asyncio.shield(question.answer)
        finally:
            question.askers -= 1
            if not question.askers:
                self._questions.pop(key, None)
        if answer is None or not answer.available:
            return None
        return FoundModel(source, answer.size)
