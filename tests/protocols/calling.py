"""Both ends of one connection by which functions are called, without a network."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from protocols import session_pair
from protocols.contexts import protocol_context, require_token
from protocols.pairs import MODEL
from protocols.session_pair import Pair, binary, one_piece
from shoal.domain.credentials import digest_of
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import OffersChanged, Rejected, RunJob
from shoal.domain.work import Call, CallStream, Feature, JobKind, Task
from shoal.domain.worker import Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import Listener, UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerMessage, ToPeer
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.tasks.registry import unknown_task_message

CallPair: TypeAlias = Pair[PeerMessage, ToPeer]

TOKEN = "a token of the fleet"
SIGNER = Signer.from_seed(bytes(reversed(range(32))))
OFFER = Offer(
    kinds=frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}),
    slots=3,
    features=frozenset({Feature.VALUES, Feature.CODE}),
    tasks=frozenset({"demo.add", "demo.échó"}),
    streams=False,
    public_key=SIGNER.public_key.hex(),
    proven=True,
    receipts=False,
    pythons=frozenset({"3.12"}),
)


REQUEST = UpgradeRequest("/shoal", address="192.0.2.7")


def counted_bytes(owner: str) -> Callable[[int], bytes]:
    """Return what draws bytes that are different each time, and the same each run."""
    count = 0

    def random_bytes(size: int) -> bytes:
        nonlocal count
        count += 1
        return (digest_of(f"{owner} {count}") * (size // 32 + 1))[:size]

    return random_bytes


MEMBER = WorkerProfile(
    "worker-one",
    MODEL,
    3,
    TOKEN,
    identity=SIGNER,
    offers=(OFFER,),
    random_bytes=counted_bytes("worker"),
)


def fleet_context(token: str = TOKEN) -> ProtocolContext:
    """Return a context in which workers present a token; empty: none."""
    return replace(
        protocol_context(admission=require_token(token)),
        token=token,
        name="coordinator",
        random_bytes=counted_bytes("coordinator"),
    )


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


CALL = Call("demo.add", packed([1, 41]), packed({}), 5.0)
STREAM = CallStream("demo.add", 5.0, python="3.12")
TASK = Task("demo.add", {"task_type": "demo.add", "args": [1], "kwargs": {"y": 2}})
RUN = RunJob(JobId("job"), LeaseNumber(2), CALL)


def in_pieces(sizes: Sequence[int], data: bytes) -> Iterable[bytes]:
    """Cut data into pieces of these sizes, again and again."""
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        yield data[at : at + size]
        at, turn = at + size, turn + 1


def sent(outputs: Sequence[object]) -> list[bytes]:
    """Return what goes to the other end, each message as one piece."""
    return binary(session_pair.sent(outputs))


def connect(
    protocol: AnyWireProtocol,
    member: WorkerProfile = MEMBER,
    context: ProtocolContext | None = None,
    cut: Callable[[bytes], Iterable[bytes]] = one_piece,
    config: object = None,
) -> CallPair:
    """Let a worker join that offers what the member does; return both ends."""
    pair = unconnected(protocol, member, context or fleet_context(), cut, config)
    pair.begin()
    if OffersChanged in pair.worker.accepts:
        pair.event(OffersChanged(member.offers))
    for each in pair.commands:
        if isinstance(each, RunJob):  # the coordinator asks for the functions
            known = sorted(name for offer in member.offers for name in offer.tasks)
            reason = unknown_task_message(each.work.kind.value, known)
            pair.event(Rejected(each.job_id, each.lease, reason))
    pair.commands.clear()
    return pair


def unconnected(
    protocol: AnyWireProtocol,
    member: WorkerProfile,
    protocol_context: ProtocolContext,
    cut: Callable[[bytes], Iterable[bytes]] = one_piece,
    config: object = None,
) -> CallPair:
    """Return both ends of a connection that is not open yet."""
    endpoints = protocol.endpoints(config or protocol.config(), protocol_context)
    listeners = {
        each.advertised_label: each for each in endpoints if isinstance(each, Listener)
    }
    binding = b"the only channel" if protocol.encrypts else b""
    if not listeners:
        route = endpoints[0]
        assert isinstance(route, WebSocketRoute)
        dialer = protocol.dial("http://127.0.0.1:4010", member)
        assert urlsplit(dialer.url).path == REQUEST.path
        accepted = route.accept(REQUEST, 0.0)
        return Pair(
            *(accepted.session, dialer.start_session({}), dialer),
            partial(ToPeer, ALL_PEERS),
            binding,
            streams=False,
        )
    # The first listener is that for jobs.
    ports = dict.fromkeys(islice(listeners, 1), 8000)
    assert protocol.address is not None
    direct = protocol.address("127.0.0.1", ports)
    dialer = protocol.dial("http://127.0.0.1:4010", replace(member, direct_url=direct))
    (label,) = ports
    session = listeners[label].accept("127.0.0.1", 0.0)
    return Pair(
        session,
        dialer.start_session({}),
        dialer,
        partial(ToPeer, ALL_PEERS),
        binding,
        cut=cut,
    )


def start_job(pair: CallPair, run: RunJob = RUN) -> RunJob:
    """Give the worker a job; return it as the worker has it."""
    (received,) = pair.command(run)
    assert isinstance(received, RunJob)
    return received
