"""The profile of a worker, as far as the wire carries it."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trustme
from msgspec import structs

from cli.coordinators import Sites
from shoal.cli.worker import join_models as memberships_module
from shoal.cli.worker.join_models import WorkerContext, model_memberships
from shoal.cli.worker.join_target import JoinTarget
from shoal.cli.worker.worker_report import ModelLoader
from shoal.config import JoinConfig
from shoal.domain.job import Privacy
from shoal.domain.work import Feature, Inference, JobKind
from shoal.domain.worker import DeviceKind, Hardware, Offer, ServedModel
from shoal.engines.engine import Finished, Item
from shoal.engines.selection import EngineSource
from shoal.engines.text_tasks import TASK_NAMES
from shoal.ledger.keys import Signer
from shoal.protocols.seam.context import Dialer, WorkerProfile
from shoal.protocols.seam.protocol import WireProtocol
from shoal.protocols.seam.session import WorkerEnd
from shoal.transports import dialer
from shoal.transports.link import LinkClosed
from shoal.worker.agent import MachineProbe, WorkerEvent, decline_sharing
from shoal.worker.health import HealthMeter
from shoal.worker.model_offers import JointOffers, SeparateOffers
from shoal.worker.owner_throttle import OwnerThrottle

SIGNER = Signer.from_seed(bytes(range(32)))
DIRECT = "tcp://host:4011"
CHATS = ServedModel("chatty", features=frozenset({Feature.STOP}), context=4096)
EMBEDS = ServedModel("embed", frozenset({JobKind.EMBEDDING}))


class Engine:
    """An engine that only lists models."""

    def __init__(self, *models: ServedModel, slots: int = 2) -> None:
        self.models: Sequence[ServedModel] = models
        self.slots = slots

    async def start(self) -> None:
        pass

    async def refresh(self) -> None:
        pass

    async def run(
        self, work: Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        yield Finished()

    async def close(self) -> None:
        pass


class Way:
    """A dialer that is not used."""

    url = "wire://host"
    headers: Mapping[str, str] = {}
    message_max = 1

    def start_session(self, headers: Mapping[str, str]) -> WorkerEnd:
        raise AssertionError("nobody dials")

    def final_reason(self, code: int, text: str) -> str | None:
        return None


def worker(joined: list[WorkerProfile], *, joint: bool, **config: Any) -> WorkerContext:
    """Return a worker whose wire records the profiles it dials with."""

    def dial(url: str, member: WorkerProfile) -> Dialer:
        joined.append(member)
        return Way()

    wire = WireProtocol(
        name="wire",
        config=object,
        endpoints=lambda config, setting: [],
        token=lambda config: "",
        schemes=frozenset({"wire"}),
        dial=dial,
        kinds=frozenset({JobKind.CHAT, JobKind.EMBEDDING}),
        has_keys=True,
        joint=joint,
    )
    target = JoinTarget("http://host", wire, "secret", None, DIRECT)
    return WorkerContext(
        "otter",
        target,
        JoinConfig(**config),
        DeviceKind.PHONE,
        Hardware(chip="a chip"),
        SIGNER,
        MachineProbe(HealthMeter().measure),
        OwnerThrottle(),
        decline_sharing,
        _ignore_event,
        lambda: None,
        ModelLoader(as_json=True),
    )


def _ignore_event(name: str, about: Mapping[str, object], event: WorkerEvent) -> None:
    pass


async def test_joint_offer_describes_each_model() -> None:
    joined: list[WorkerProfile] = []
    config = {"only_for": ("alice",), "privacy": "public", "passcode": "wildlife"}
    sources = [
        EngineSource("one", Engine(CHATS, EMBEDS)),
        EngineSource("two", Engine(structs.replace(CHATS, name="other"), slots=7)),
    ]

    (offered,) = model_memberships(worker(joined, joint=True, **config), sources)

    assert isinstance(offered, JointOffers)
    (member,) = joined
    assert (member.name, member.token) == ("otter", "secret")
    assert (member.direct_url, member.passcode) == (DIRECT, "wildlife")
    assert (member.identity, member.hardware.chip) == (SIGNER, "a chip")
    assert len(member.random_bytes(8)) == 8
    chatty = Offer(
        kinds=frozenset({JobKind.CHAT, JobKind.TASK}),
        models=frozenset({"chatty"}),
        slots=2,
        features=frozenset({Feature.STOP}),
        context=4096,
        only_for=frozenset({"alice"}),
        privacy=Privacy.PUBLIC,
        tasks=TASK_NAMES,
        device=DeviceKind.PHONE,
        public_key=SIGNER.public_key.hex(),
        engine=member.offers[0].engine,
    )
    other = member.offers[2].engine
    assert len({"", chatty.engine, other}) == 3, "one has its slots, and two its own"
    assert member.offers == (
        chatty,
        structs.replace(
            chatty,
            kinds=frozenset({JobKind.EMBEDDING}),
            models=frozenset({"embed"}),
            features=frozenset(),
            context=0,
            tasks=frozenset(),
        ),
        structs.replace(chatty, models=frozenset({"other"}), slots=7, engine=other),
    )


async def test_requested_slots_apply_to_each_engine() -> None:
    joined: list[WorkerProfile] = []
    sources = [EngineSource("one", Engine(CHATS)), EngineSource("two", Engine(EMBEDS))]

    model_memberships(worker(joined, joint=True, slots=9), sources)

    assert [each.slots for each in joined[0].offers] == [9, 9]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["one"], ["otter"]),
        (["one", "one"], ["otter", "otter"]),
        (["one", "two"], ["otter-one", "otter-two"]),
    ],
)
async def test_separate_offers_distinguish_engines_by_name(
    labels: list[str], names: list[str]
) -> None:
    joined: list[WorkerProfile] = []
    sources = [EngineSource(label, Engine(CHATS)) for label in labels]

    offered = model_memberships(worker(joined, joint=False), sources)

    assert len(offered) == len(labels)
    for each in offered:
        assert isinstance(each, SeparateOffers)
        each._create_agent(CHATS)
    assert [member.name for member in joined] == names
    assert {member.model for member in joined} == {CHATS}
    assert {member.tasks for member in joined} == {TASK_NAMES}
    assert {member.slots for member in joined} == {2}


def fleet_address(host: str, ports: Mapping[str, int]) -> str:
    return f"tcp://{host}:{ports['transport']}" if ports else ""


async def closed(url: str, fingerprint: bytes | None = None) -> LinkClosed:
    """Dial a coordinator's direct port; return why that fails."""
    wire = replace(worker([], joint=True).target.protocol, address=fleet_address)
    target = JoinTarget(url, wire, "secret", fingerprint, DIRECT)
    with pytest.raises(LinkClosed) as caught:
        async with memberships_module._dial(target, DIRECT, {}, 1000):
            raise AssertionError("nobody listens there")
    return caught.value


async def test_unreachable_coordinator_and_one_without_a_direct_port_differ(
    sites: Sites,
) -> None:
    away = await closed("http://127.0.0.1:1")
    without = await closed(await sites({"/healthz": {"shoal": "0.2"}}))

    assert away.code == memberships_module.AWAY
    assert "connection refused" in str(away)
    assert without.code != memberships_module.AWAY
    assert "has only its HTTP port" in str(without)


async def test_silent_direct_port_times_out_early(
    sites: Sites, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def never(*_: object, **__: object) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    health = {"shoal": "0.2", "direct": {"wire": {"transport": 4011}}}
    url = await sites({"/healthz": health})
    monkeypatch.setattr(dialer, "dial", never)
    monkeypatch.setattr(memberships_module, "DIRECT_TIMEOUT", 0.01)

    assert "no answer within 0.01 s" in str(await closed(url))


async def test_wrong_certificate_is_not_an_outage() -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    async with await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context
    ) as server:
        port = server.sockets[0].getsockname()[1]
        why = await closed(f"https://127.0.0.1:{port}", bytes(32))

    assert why.code != memberships_module.AWAY
    assert "is not the one in the token" in str(why)
