"""What Shoal's own wire takes for a worker's greeting, its offer, and each token.

*sent*: bytes of the WebSocket's messages, with encryption.  *frames*: WebSocket frames.
A token is a word of an answer whose job's id has 24 characters.  *alone*: each is sent
as it comes; *together*: 64 answers have one at the same time.

Before, Shoal's machines spoke TealeNet's wire with an extension: 1,895 and 1,342 bytes
to greet, and 268 bytes and a frame for each token (commit 6cde992d).
"""

from collections.abc import Sequence

from report import Goal, Results
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import AnswerChunk, OffersChanged, RunJob
from shoal.domain.work import Chat, Feature, JobKind
from shoal.domain.worker import Hardware, Offer, ServedModel
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.admission import (
    NO_JOIN_TOKEN,
    AdmissionGrant,
    JoinRequest,
    proves_token,
)
from shoal.protocols.seam.context import ProtocolContext, WorkerProfile
from shoal.protocols.seam.encrypted_stream import PLAIN_MAX, RecordSealer
from shoal.protocols.seam.endpoints import UpgradeRequest, WebSocketRoute
from shoal.protocols.seam.noise import Sealer
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerMessage, ToPeer
from shoal.protocols.seam.session import Output, Send
from shoal.protocols.shoal import PROTOCOL, WORKER_PATH

ROUNDS = 1  # nothing of it varies
ANSWERS = 64
MASK = 4  # bytes of each frame of a client (RFC 6455, section 5.3)

GREETING = "the worker greets: bytes sent"
ANSWER = "the coordinator answers: bytes sent"
OFFER = "an offer of one model: bytes sent"
ALONE = "a token, alone: bytes sent"
TOGETHER = "a token, together with 63 others: bytes sent"
FRAMES = "a token, together with 63 others: frames"
GOALS = [
    Goal(ALONE, at_most=80),
    Goal(TOGETHER, at_most=60),
    Goal(GREETING, at_most=700),
]
CONTEXT = 8192
TOKEN = "a join token of the pool"
HARDWARE = Hardware("AMD Ryzen 9 7950X", memory_gb=64.0)


def measure(rounds: int) -> Results:
    results: Results = {}
    for _ in range(rounds):
        for row, value in _measured().items():
            results.setdefault(row, []).append(value)
    return results


def _measured() -> dict[str, float]:
    signers = [Signer.from_seed(bytes([n]) * 32) for n in (1, 2)]
    context = ProtocolContext(_admit, bytes, signers[0], verify, hardware=HARDWARE)
    routes = PROTOCOL.endpoints(PROTOCOL.config(), context)
    request = UpgradeRequest(WORKER_PATH, address="192.0.2.1")
    route = next(
        each
        for each in routes
        if isinstance(each, WebSocketRoute) and each.claims(request)
    )
    coordinator = route.accept(request, 0.0).session
    profile = WorkerProfile(
        *("otter", ServedModel("qwen3-8b"), 4, TOKEN),
        identity=signers[1],
        hardware=HARDWARE,
        expected_models=("qwen3-8b",),
        offers=(),
    )
    worker = PROTOCOL.dial("http://192.0.2.2:4010", profile).start_session({})
    for each in (coordinator, worker):
        each.bind(b"one channel")  # type: ignore[attr-defined]
    coordinator.tick(0.0)
    greeting = _data(worker.tick(0.0))
    answer = _data(coordinator.receive(greeting, 0.0))
    worker.receive(answer, 0.0)
    model = Offer(
        kinds=frozenset({JobKind.CHAT}),
        models=frozenset({"qwen3-8b"}),
        slots=4,
        features=frozenset(Feature),
        context=CONTEXT,
    )
    offer = _data(worker.send(OffersChanged((model,)), 0.0))
    tokens = []
    for number in range(ANSWERS):
        job = RunJob(JobId(f"{number:024}"), LeaseNumber(1), Chat("qwen3-8b", ()))
        told = _data(coordinator.send(ToPeer(ALL_PEERS, job), 0.0))
        (run,) = (e for e in worker.receive(told, 0.0) if isinstance(e, RunJob))
        tokens += _data(worker.send(AnswerChunk(run.job_id, 1, [" word"]), 0.0))
    together = b"".join(tokens)
    return {
        GREETING: _sent(greeting, masked=True),
        ANSWER: _sent(answer, masked=False),
        OFFER: _sent(offer, masked=True),
        ALONE: _sent(tokens, masked=True) / ANSWERS,
        TOGETHER: _sent([together], masked=True) / ANSWERS,
        FRAMES: 1 / ANSWERS,
    }


def _admit(request: JoinRequest) -> AdmissionGrant:
    assert proves_token(request.token, TOKEN)
    return NO_JOIN_TOKEN


def _data(outputs: Sequence[PeerMessage | Output | object]) -> list[bytes]:
    return [
        each.data
        for each in outputs
        if isinstance(each, Send) and isinstance(each.data, bytes)
    ]


def _sent(messages: Sequence[bytes], *, masked: bool) -> float:
    """Return the bytes of messages as they are sent, each in a frame of its own."""
    seal = RecordSealer(Sealer(bytes(32))).seal
    total = 0
    for each in messages:
        assert len(each) <= PLAIN_MAX, "it is one record"
        size = len(seal(each))
        total += size + (2 if size < 126 else 4) + (MASK if masked else 0)
    return total
