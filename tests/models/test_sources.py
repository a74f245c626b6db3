"""Questions to all peers about a model, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shoal.domain.model_messages import ModelAnswer, ModelMessage, ModelQuery
from shoal.models.sources import (
    ANSWER_TIMEOUT,
    NAMES_MAX,
    REPEAT_AFTER,
    FoundModel,
    ModelSource,
    ModelSources,
)
from simulation import virtual


@dataclass
class Peer:
    """A peer with models, which answers from its ``answers_from``-th question on."""

    name: str
    sources: ModelSources
    models: dict[str, int] = field(default_factory=dict)
    answers_from: int = 1
    received: list[ModelMessage] = field(default_factory=list)
    source: ModelSource = field(init=False)

    def __post_init__(self) -> None:
        self.source = ModelSource(self.name, self.send)
        self.sources.add(self.source)

    def send(self, message: ModelMessage) -> bool:
        self.received.append(message)
        assert isinstance(message, ModelQuery)
        if len(self.received) >= self.answers_from:
            size = self.models.get(message.model)
            answer = ModelAnswer(message.model, size is not None, size)
            asyncio.get_running_loop().call_soon(
                self.sources.receive, self.name, answer
            )
        return True


def play(script: Callable[[ModelSources], Awaitable[None]]) -> None:
    async def scenario() -> None:
        await script(ModelSources())

    virtual.run(scenario())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_all_peers_are_asked_and_those_that_have_the_model_are_found() -> None:
    async def script(sources: ModelSources) -> None:
        with_it = [Peer("b", sources, {"m": 2}), Peer("a", sources, {"m": 1})]
        without = Peer("c", sources)

        found = await sources.find("m", sources.all)

        expected = [FoundModel(each.source, each.models["m"]) for each in with_it[::-1]]
        assert found == expected
        assert without.received == [ModelQuery("m")]
        assert await sources.find("n", sources.all) == []
        assert await sources.find("m", []) == []

    play(script)


def test_a_question_is_repeated_once_and_a_silent_peer_is_left_out() -> None:
    async def script(sources: ModelSources) -> None:
        silent = Peer("silent", sources, answers_from=9)
        deaf = Peer("deaf", sources, {"m": 5}, answers_from=2)
        began = now()

        found = await sources.find("m", sources.all)

        assert found == [FoundModel(deaf.source, 5)]
        assert now() - began == ANSWER_TIMEOUT
        assert silent.received == [ModelQuery("m")] * 2

    play(script)


def test_the_first_copy_is_enough_where_one_is_needed() -> None:
    async def script(sources: ModelSources) -> None:
        Peer("silent", sources, answers_from=9)
        deaf = Peer("deaf", sources, {"m": 5}, answers_from=2)
        began = now()

        found = await sources.find("m", sources.all, first=True)

        assert found == [FoundModel(deaf.source, 5)]
        assert now() - began == REPEAT_AFTER

    play(script)


def test_a_peer_that_leaves_is_not_waited_for() -> None:
    async def script(sources: ModelSources) -> None:
        Peer("silent", sources, {"m": 1}, answers_from=9)
        asking = asyncio.create_task(sources.find("m", sources.all))
        began = now()
        await asyncio.sleep(1.0)

        sources.remove("silent")

        assert await asking == []
        assert now() - began == 1.0
        assert list(sources.all) == []

    play(script)


def test_questions_for_the_same_model_share_an_answer() -> None:
    async def script(sources: ModelSources) -> None:
        peer = Peer("a", sources, {"m": 1})

        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(sources.find("m", sources.all)) for _ in range(3)
            ]

        assert [await each for each in asking] == [[FoundModel(peer.source, 1)]] * 3
        assert peer.received == [ModelQuery("m")]

    play(script)


def test_a_peer_is_asked_for_a_few_models_at_a_time() -> None:
    async def script(sources: ModelSources) -> None:
        peer = Peer("a", sources, answers_from=10_000)

        asking = [
            asyncio.create_task(sources.find(f"m{number}", sources.all))
            for number in range(NAMES_MAX + 1)
        ]
        await asyncio.sleep(1.0)

        assert len(peer.received) == NAMES_MAX
        await asyncio.gather(*asking)
        assert ModelQuery(f"m{NAMES_MAX}") in peer.received

    play(script)


def test_answers_without_a_question_are_ignored() -> None:
    async def script(sources: ModelSources) -> None:
        assert not sources.receive("a", ModelAnswer("m", True, 1))
        Peer("a", sources)
        assert sources.receive("a", ModelAnswer("m", True, 1))
        sources.remove("a")

        assert await sources.find("m", sources.all) == []

    play(script)
