"""Two pools on Shoal's own wire: who may do what, and which connection stays."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from protocols.calling import CALL, MEMBER, RUN
from protocols.contexts import protocol_context, require_token
from protocols.pairs import CHAT
from protocols.session_pair import Pair
from shoal.domain.errors import ConfigError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Completed,
    Dismiss,
    OffersChanged,
    RunJob,
)
from shoal.domain.work import Feature
from shoal.ledger.keys import Signer
from shoal.protocols.seam.admission import WRONG_TOKEN
from shoal.protocols.seam.endpoints import (
    TLS_KEY,
    DiscoveredService,
    Listener,
    OutgoingConnection,
    ServiceBrowser,
    UpgradeRequest,
    WebSocketRoute,
)
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.protocol import Endpoint
from shoal.protocols.seam.session import Send
from shoal.protocols.seam.token_proof import NOT_PROVEN
from shoal.protocols.shoal import POOL_PATH, PROTOCOL, WORKER_PATH, Config
from shoal.protocols.shoal.codec import EVENT_DECODER, VERSION, Opening, encode
from shoal.protocols.shoal.session import (
    CONNECTED,
    ITSELF,
    NAME_TAKEN,
    WRONG_PASSCODE,
    ShoalSession,
)
from shoal.protocols.shoal.streams import HEAD, OutgoingStreams

REEF = "the passcode of the reef"
JOIN_TOKEN = "a join token of the pool"
SMALL, LARGE = sorted(
    (Signer.from_seed(bytes([n]) * 32) for n in (1, 2)), key=lambda s: s.public_key
)


class OnePool:
    """A pool: what it accepts and dials."""

    def __init__(
        self,
        name: str,
        signer: Signer,
        passcode: str = REEF,
        *,
        token: str = JOIN_TOKEN,
        peers: Sequence[str] = ("http://127.0.0.1:4010",),
        browse: bool = False,
    ) -> None:
        around = protocol_context(admission=require_token(token))
        around = replace(around, identity=signer, name=name)
        config = Config(passcode, tuple(peers), browse)
        self.endpoints: Sequence[Endpoint] = PROTOCOL.endpoints(config, around)

    def accept(self, path: str = POOL_PATH, address: str = "192.0.2.1") -> PeerSession:
        request = UpgradeRequest(path, address=address)
        routes = [each for each in self.endpoints if isinstance(each, WebSocketRoute)]
        (route,) = (each for each in routes if each.claims(request))
        return route.accept(request, 0.0).session

    def dial(self) -> PeerSession:
        (outgoing,) = (e for e in self.endpoints if isinstance(e, OutgoingConnection))
        return outgoing.new_session(0.0)

    @property
    def browser(self) -> ServiceBrowser:
        (browser,) = (e for e in self.endpoints if isinstance(e, ServiceBrowser))
        return browser


def pair(dialling: OnePool, accepting: OnePool, now: float = 0.0) -> "Pair[Any, Any]":
    """Connect two pools; ``commands`` are what the dialling one receives."""
    both: Pair[Any, Any] = Pair(
        *(accepting.accept(), dialling.dial(), None),  # type: ignore[arg-type]
        addressed=lambda command: ToPeer(ALL_PEERS, command),
        binding=b"one channel",
        streams=False,
    )
    both.begin(now)
    both.commands = received(both)
    return both


def received(both: "Pair[Any, Any]") -> list[Any]:
    return [
        each.message if isinstance(each, PeerMessage) else each
        for each in both.commands
    ]


def joined(messages: Sequence[object]) -> PeerJoined | None:
    return next((each for each in messages if isinstance(each, PeerJoined)), None)


def test_pools_with_one_passcode_serve_each_other() -> None:
    one, other = OnePool("one", SMALL), OnePool("other", LARGE)

    both = pair(one, other)

    for seen, name, key in (
        (both.events, "one", SMALL),
        (both.commands, "other", LARGE),
    ):
        peer = joined(seen)
        assert peer is not None
        assert (peer.name, peer.public_key) == (name, key.public_key.hex())
        assert peer.submits_jobs
        assert peer.cancels
        assert peer.respects_offers
        assert not peer.exclusive


def test_both_pools_offer_and_submit() -> None:
    both = pair(OnePool("one", SMALL), OnePool("other", LARGE))
    chunk: Any = AnswerChunk(RUN.job_id, RUN.lease, ["a"])

    def to_peer(message: Any) -> Any:
        return ToPeer(ALL_PEERS, message)

    messages: Sequence[Any] = (OffersChanged(MEMBER.offers), RUN)
    for message in messages:
        assert both.command(message)
        assert both.event(to_peer(message))
    # Each answers the job of the other.
    both.command(chunk)
    assert received(both)[-1] == chunk
    assert both.event(to_peer(chunk)) == [chunk]
    both.command(CancelJob(RUN.job_id, RUN.lease))
    assert received(both)[-1] == CancelJob(RUN.job_id, RUN.lease)


def test_what_a_pool_offers_is_never_offered_on() -> None:
    """Jobs would go in a circle: see ``pool.own_offers``."""
    both = pair(OnePool("one", SMALL), OnePool("other", LARGE))

    (changed,) = both.event(ToPeer(ALL_PEERS, OffersChanged(MEMBER.offers)))  # type: ignore[arg-type]

    assert isinstance(changed, OffersChanged)
    assert all(each.neighbour for each in changed.offers)


def test_an_answer_of_a_pool_has_its_receipt() -> None:
    both = pair(OnePool("one", SMALL), OnePool("other", LARGE))
    job = RunJob(JobId("job"), LeaseNumber(1), CHAT)

    both.command(job)
    (end,) = both.event(
        ToPeer(ALL_PEERS, Completed(job.job_id, job.lease, "stop", None))  # type: ignore[arg-type]
    )

    assert isinstance(end, Completed)
    assert end.receipt is not None


@pytest.mark.parametrize(
    ("passcode", "reason"),
    [("a guess", WRONG_TOKEN), ("", WRONG_TOKEN)],
)
def test_another_passcode_is_refused(passcode: str, reason: str) -> None:
    both = pair(OnePool("one", SMALL, passcode), OnePool("other", LARGE))

    assert joined(both.events) is None
    assert reason in both.ends[-1]


def test_a_wrong_passcode_is_refused_where_workers_need_no_token() -> None:
    both = pair(OnePool("one", SMALL, "a guess"), OnePool("other", LARGE, token=""))

    assert joined(both.events) is None
    assert WRONG_PASSCODE in both.ends[-1]


def test_a_pool_with_a_join_token_only_serves() -> None:
    both = pair(OnePool("one", SMALL, JOIN_TOKEN), OnePool("other", LARGE))

    there, here = joined(both.events), joined(both.commands)
    assert there is not None
    assert not there.submits_jobs
    assert here is not None
    assert here.submits_jobs
    offered: Any = OffersChanged(MEMBER.offers)
    assert both.command(offered) == []  # it could submit nothing
    assert both.event(ToPeer(ALL_PEERS, offered)) != []  # type: ignore[arg-type]


def test_who_answers_has_to_prove_the_passcode() -> None:
    both = pair(OnePool("one", SMALL), OnePool("other", LARGE, "", token=""))

    assert joined(both.commands) is None
    assert NOT_PROVEN in both.ends


def test_code_goes_only_where_the_passcode_was_proved() -> None:
    code = structs.replace(
        RUN, work=structs.replace(CALL, needs=frozenset({Feature.CODE}))
    )
    trusted = pair(OnePool("one", SMALL), OnePool("other", LARGE))
    open_ = pair(OnePool("one", SMALL, ""), OnePool("other", LARGE, "", token=""))

    assert trusted.command(code)
    assert not open_.command(code)


def write_frame(hello: Opening) -> bytes:
    written = OutgoingStreams().write((encode(hello),))
    assert isinstance(written, Send)
    return bytes(written.data)  # type: ignore[arg-type]  # as all of this wire


def sent(outputs: Sequence[object]) -> Opening:
    """Return the hello among the outputs of a session."""
    data = next(bytes(each.data) for each in outputs if isinstance(each, Send))  # type: ignore[arg-type]
    hello = EVENT_DECODER.decode(data[HEAD.size :])
    assert isinstance(hello, Opening)
    return hello


@pytest.mark.parametrize("path", [WORKER_PATH, POOL_PATH])
@pytest.mark.parametrize("binding", [b"", b"one channel"], ids=["plain", "encrypted"])
def test_who_proves_nothing_gets_nothing_of_the_passcode(
    path: str, binding: bytes
) -> None:
    pool = OnePool("other", LARGE, token="")
    session: Any = pool.accept(path, "127.0.0.1")
    if binding:
        session.bind(binding)
    session.tick(0.0)
    hello = Opening(VERSION, "stranger", path == WORKER_PATH)

    told = sent(session.receive([write_frame(hello)], 0.0))

    assert (told.token, told.token_proof) == ("", b"")


@pytest.mark.parametrize("end", [0, 1], ids=["replayed", "reflected"])
def test_a_recorded_proof_of_the_passcode_admits_nobody(end: int) -> None:
    """Neither on another channel, nor back to who made it on its own."""
    channel = b"one channel"
    pool = OnePool("other", LARGE, token="")
    dialling: Any = OnePool("one", SMALL).dial()
    accepting: Any = pool.accept()
    for each in (dialling, accepting):
        each.bind(channel)
    accepting.tick(0.0)
    greeting = sent(dialling.tick(0.0))
    answer = sent(accepting.receive([write_frame(greeting)], 0.0))
    proof = (greeting, answer)[end].token_proof
    assert proof

    for binding in (b"another channel", channel) if end else (b"another channel",):
        session: Any = pool.accept()
        session.bind(binding)
        session.tick(0.0)
        hello = Opening(VERSION, "thief", False, token_proof=proof)
        outputs = session.receive([write_frame(hello)], 0.0)

        assert not [each for each in outputs if isinstance(each, PeerMessage)]
        assert any(WRONG_PASSCODE in str(each) for each in outputs)


def test_a_pool_does_not_connect_to_itself() -> None:
    one = OnePool("one", SMALL)

    assert ITSELF in pair(one, one).ends[-1]


def test_a_name_is_one_pool_s() -> None:
    there = OnePool("there", LARGE)
    third = Signer.from_seed(bytes(32))
    first = pair(OnePool("one", SMALL), there)

    second = pair(OnePool("one", third), there)

    assert joined(first.events)
    assert NAME_TAKEN in second.ends[-1]


@pytest.mark.parametrize("first", ["small", "large"])
def test_of_two_connections_the_one_of_the_smaller_key_stays(first: str) -> None:
    small, large = OnePool("small", SMALL), OnePool("large", LARGE)
    one, other = (small, large) if first == "small" else (large, small)
    before = pair(one, other)

    after = pair(other, one)

    assert joined(before.events)
    if first == "small":
        assert CONNECTED in after.ends[-1]
    else:
        assert joined(after.events)


def test_a_cut_connection_gives_way_to_one_of_the_other_end() -> None:
    small, large = OnePool("small", SMALL), OnePool("large", LARGE)
    cut = pair(small, large)
    assert isinstance(cut.worker, ShoalSession)

    cut.worker.connection_lost(1.0)

    assert joined(pair(large, small).events)


def test_a_dismissed_pool_closes() -> None:
    both = pair(OnePool("one", SMALL), OnePool("other", LARGE))

    both.command(Dismiss("the operator's order"))

    assert "the operator's order" in both.ends


def announced(name: str, **text: str) -> DiscoveredService:
    return DiscoveredService(name, ("192.0.2.7",), 4010, text)


def test_pools_that_are_found_are_dialled_once() -> None:
    one, other = (
        OnePool("one", SMALL, browse=True),
        OnePool("other", LARGE, browse=True, peers=()),
    )
    found = one.browser.on_found(announced("other"), 0.0)
    assert found is not None
    assert found.url == "noise+ws://192.0.2.7:4010/shoal/pool"
    assert one.browser.on_found(announced("one"), 0.0) is None

    both = pair(one, other)

    assert joined(both.events)
    assert one.browser.on_found(announced("other"), 1.0) is None
    assert other.browser.on_found(announced("one"), 1.0) is None
    assert one.browser.on_found(announced("other"), 60.0) is not None  # silent since


def test_a_pool_that_proves_the_passcode_may_have_any_certificate() -> None:
    browser = OnePool("one", SMALL, browse=True).browser
    found = browser.on_found(announced("other", **{TLS_KEY: "1"}), 0.0)
    assert found is not None
    assert found.url == "noise+wss-any://192.0.2.7:4010/shoal/pool"

    (outgoing,) = (
        each
        for each in OnePool("one", SMALL, "", peers=["https://host"]).endpoints
        if isinstance(each, OutgoingConnection)
    )
    assert outgoing.url == "noise+wss://host/shoal/pool"


def test_pools_are_looked_for_only_with_a_passcode() -> None:
    with pytest.raises(ConfigError, match="--shoal-passcode"):
        OnePool("one", SMALL, "", browse=True)


def test_the_wire_has_no_port_of_its_own() -> None:
    assert not [e for e in OnePool("one", SMALL).endpoints if isinstance(e, Listener)]
