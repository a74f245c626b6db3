"""What a worker presents to a coordinator, by what the coordinator's wire can say."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.cli.memberships import Worker, memberships
from shoal.cli.whereto import Target
from shoal.config import JoinConfig
from shoal.domain.work import Feature, Inference, Kind
from shoal.domain.worker import Device, Hardware, Model, Offer
from shoal.engines.choose import Source
from shoal.engines.port import Finished, Item
from shoal.engines.tasks import TASK_NAMES
from shoal.ledger.keys import Signer
from shoal.protocols import Protocol
from shoal.protocols.session import Dialer, Member, WorkerSession
from shoal.worker.agent import Happening
from shoal.worker.assortment import Assortment
from shoal.worker.health import Meter
from shoal.worker.offering import Offering
from shoal.worker.ports import Machine, share_nothing

SIGNER = Signer.from_seed(bytes(range(32)))
CHATS = Model("chatty", features=frozenset({Feature.STOP}), context=4096)
EMBEDS = Model("embed", frozenset({Kind.EMBEDDING}))


class Engine:
    """Has models, and is asked for nothing more."""

    def __init__(self, *models: Model, slots: int = 2) -> None:
        self.models: Sequence[Model] = models
        self.slots = slots

    async def start(self) -> None:
        pass

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Inference, continues: str = ""
    ) -> AsyncGenerator[Item, None]:
        yield Finished()

    async def close(self) -> None:
        pass


class Way:
    """A dialer that is not used."""

    url = "wire://host"
    headers: Mapping[str, str] = {}
    message_max = 1

    def connected(self, headers: Mapping[str, str]) -> WorkerSession:
        raise AssertionError("nobody dials")

    def final(self, code: int, text: str) -> str | None:
        return None


def worker(joined: list[Member], *, joint: bool, **config: Any) -> Worker:
    """Return a worker whose wire notes as whom it would be joined."""

    def dial(url: str, member: Member) -> Dialer:
        joined.append(member)
        return Way()

    wire = Protocol(
        name="wire",
        config=object,
        endpoints=lambda config, setting: [],
        schemes=frozenset({"wire"}),
        dial=dial,
        signs=True,
        joint=joint,
    )
    there = Target("http://host", wire, "secret", None, "tcp://host:4011")
    return Worker(
        "otter",
        there,
        JoinConfig(**config),
        Device.PHONE,
        Hardware(chip="a chip"),
        SIGNER,
        Machine(Meter().measure),
        share_nothing,
        _tell_nobody,
        lambda: None,
    )


def _tell_nobody(name: str, about: Mapping[str, object], happening: Happening) -> None:
    pass


async def test_one_connection_for_all_models_says_what_each_can_do() -> None:
    joined: list[Member] = []
    config = {"only_for": ("alice",), "passcode": "wildlife"}
    sources = [
        Source("one", Engine(CHATS, EMBEDS)),
        Source("two", Engine(replace(CHATS, name="other"), slots=7)),
    ]

    (offered,) = memberships(worker(joined, joint=True, **config), sources)

    assert isinstance(offered, Assortment)
    (member,) = joined
    assert (member.name, member.token) == ("otter", "secret")
    assert (member.direct, member.passcode) == ("tcp://host:4011", "wildlife")
    assert (member.identity, member.hardware.chip) == (SIGNER, "a chip")
    assert len(member.draw(8)) == 8
    chatty = Offer(
        kinds=frozenset({Kind.CHAT, Kind.TASK}),
        models=frozenset({"chatty"}),
        slots=2,
        features=frozenset({Feature.STOP}),
        context=4096,
        only_for=frozenset({"alice"}),
        tasks=TASK_NAMES,
        device=Device.PHONE,
        public_key=SIGNER.public_key.hex(),
    )
    assert member.offers == (
        chatty,
        replace(
            chatty,
            kinds=frozenset({Kind.EMBEDDING}),
            models=frozenset({"embed"}),
            features=frozenset(),
            context=0,
            tasks=frozenset(),
        ),
        replace(chatty, models=frozenset({"other"}), slots=7),
    )


async def test_slots_that_are_asked_for_are_those_of_each_engine() -> None:
    joined: list[Member] = []
    sources = [Source("one", Engine(CHATS)), Source("two", Engine(EMBEDS))]

    memberships(worker(joined, joint=True, slots=9), sources)

    assert [each.slots for each in joined[0].offers] == [9, 9]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["one"], ["otter"]),
        (["one", "one"], ["otter", "otter"]),
        (["one", "two"], ["otter-one", "otter-two"]),
    ],
)
async def test_a_connection_for_each_model_tells_engines_apart_by_name(
    labels: list[str], names: list[str]
) -> None:
    joined: list[Member] = []
    sources = [Source(label, Engine(CHATS)) for label in labels]

    offered = memberships(worker(joined, joint=False), sources)

    assert len(offered) == len(labels)
    for each in offered:
        assert isinstance(each, Offering)
        each._enlist(CHATS)
    assert [member.name for member in joined] == names
    assert {member.model for member in joined} == {CHATS}
    assert {member.tasks for member in joined} == {TASK_NAMES}
    assert {member.slots for member in joined} == {2}
