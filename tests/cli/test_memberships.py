"""What a worker presents to a coordinator, by what the coordinator's wire can say."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trustme

from cli.coordinators import Sites
from shoal.cli import memberships as memberships_module
from shoal.cli.memberships import Worker, memberships
from shoal.cli.whereto import Target
from shoal.config import JoinConfig
from shoal.domain.work import Feature, Inference, Kind
from shoal.domain.worker import Device, Hardware, Model, Offer
from shoal.engines.choose import Source
from shoal.engines.port import Finished, Item
from shoal.engines.tasks import TASK_NAMES
from shoal.ledger.keys import Signer
from shoal.protocols import WireProtocol
from shoal.protocols.session import Dialer, Member, WorkerSession
from shoal.runtime.link import LinkClosed
from shoal.transports import dialling
from shoal.worker.agent import Happening
from shoal.worker.assortment import Assortment
from shoal.worker.health import Meter
from shoal.worker.offering import Offering
from shoal.worker.ports import Machine, share_nothing

SIGNER = Signer.from_seed(bytes(range(32)))
DIRECT = "tcp://host:4011"
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

    wire = WireProtocol(
        name="wire",
        config=object,
        endpoints=lambda config, setting: [],
        token=lambda config: "",
        schemes=frozenset({"wire"}),
        dial=dial,
        signs=True,
        joint=joint,
    )
    there = Target("http://host", wire, "secret", None, DIRECT)
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
    assert (member.direct, member.passcode) == (DIRECT, "wildlife")
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


async def closed(url: str, fingerprint: bytes | None = None) -> LinkClosed:
    """Dial a coordinator's other port; return why that does not come about."""
    wire = worker([], joint=True).there.protocol
    there = Target(url, wire, "secret", fingerprint, DIRECT)
    with pytest.raises(LinkClosed) as caught:
        async with memberships_module._dial(there, DIRECT, {}, 1000):
            raise AssertionError("nobody listens there")
    return caught.value


async def test_one_that_is_away_is_told_from_one_that_has_no_other_port(
    sites: Sites,
) -> None:
    away = await closed("http://127.0.0.1:1")
    without = await closed(await sites({"/healthz": {"shoal": "0.2"}}))

    assert away.code == memberships_module.AWAY
    assert "connection refused" in str(away)
    assert without.code != memberships_module.AWAY
    assert "no port beside that of HTTP" in str(without)


async def test_a_port_that_does_not_answer_is_given_up_before_the_others_are(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def never(*_: object, **__: object) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    health = {"shoal": "0.2", "direct": {"wire": {"tcp": 4011}}}
    url = await sites({"/healthz": health})
    monkeypatch.setattr(dialling, "dial", never)
    monkeypatch.setattr(memberships_module, "DIRECT_LIMIT", 0.01)

    assert "no answer within 0.01 s" in str(await closed(url))


async def test_one_that_has_another_certificate_is_not_taken_to_be_away() -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
    ) as server:
        port = server.sockets[0].getsockname()[1]
        why = await closed(f"https://127.0.0.1:{port}", bytes(32))

    assert why.code != memberships_module.AWAY
    assert "another certificate" in str(why)
