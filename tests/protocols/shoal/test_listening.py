"""A coordinator dials a worker that listens: roles as ever, the other end opens."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from protocols.calling import (
    CALL,
    OFFER,
    REQUEST,
    RUN,
    SIGNER,
    TOKEN,
    fleet_context,
    packed,
)
from protocols.contexts import require_token
from protocols.session_pair import Pair
from shoal.domain.errors import ConfigError
from shoal.domain.vocabulary import Completed, OffersChanged, RunJob
from shoal.domain.work import Feature
from shoal.protocols.seam.admission import WRONG_TOKEN
from shoal.protocols.seam.endpoints import OutgoingConnection, WebSocketRoute
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerJoined,
    PeerMessage,
    PeerSession,
    ToPeer,
)
from shoal.protocols.seam.token_proof import NOT_PROVEN
from shoal.protocols.shoal import PROTOCOL, Config, worker_endpoints
from shoal.protocols.shoal.session import NAME_TAKEN, PLAIN

CONFIG = Config(workers=("192.0.2.7:4010",))


def dialled(token: str = TOKEN, **changes: Any) -> PeerSession:
    """Return a coordinator's end of a connection that it opens."""
    context = replace(fleet_context(token), **changes)
    endpoints = PROTOCOL.endpoints(CONFIG, context)
    (outgoing,) = (each for each in endpoints if isinstance(each, OutgoingConnection))
    assert outgoing.url == "noise+ws://192.0.2.7:4010/shoal"
    return outgoing.new_session(0.0)


def listening(token: str = TOKEN, name: str = "gpu") -> PeerSession:
    """Return a worker's end of a connection that it accepts."""
    context = fleet_context(token)
    context = replace(
        context, name=name, identity=SIGNER, admission=require_token(token)
    )
    (route,) = worker_endpoints(Config(), context)
    assert isinstance(route, WebSocketRoute)
    assert route.claims(REQUEST)
    return route.accept(replace(REQUEST, address="192.0.2.1"), 0.0).session


def connect(
    coordinator: PeerSession, worker: PeerSession, binding: bytes = b"one channel"
) -> "Pair[Any, Any]":
    pair: Pair[Any, Any] = Pair(
        *(coordinator, worker, None),  # type: ignore[arg-type]
        addressed=lambda command: ToPeer(ALL_PEERS, command),
        binding=binding,
        streams=False,
    )
    pair.begin()
    return pair


def test_the_coordinator_submits_and_the_worker_offers_whoever_dialled() -> None:
    pair = connect(dialled(), listening())
    code = structs.replace(CALL, needs=frozenset({Feature.CODE}))

    offers = pair.worker.send(ToPeer(ALL_PEERS, OffersChanged((OFFER,))), 0.0)  # type: ignore[arg-type]
    pair.deliver((), offers, 0.0)
    (run,) = pair.command(structs.replace(RUN, work=code))
    end = Completed(RUN.job_id, RUN.lease, value=packed(42))
    pair.deliver((), pair.worker.send(ToPeer(ALL_PEERS, end), 0.0), 0.0)  # type: ignore[arg-type]

    joined, *_ = pair.events
    assert isinstance(joined, PeerJoined)
    assert (joined.name, joined.public_key) == ("gpu", SIGNER.public_key.hex())
    assert joined.exclusive
    *_, received = (each for each in pair.events if isinstance(each, OffersChanged))
    assert received.offers[0].proven
    # Both have proved the token, so code is run and sent.
    assert isinstance(run, PeerMessage)
    assert isinstance(run.message, RunJob)
    assert pair.events[-1] == end
    (admitted,) = (
        each.message
        for each in pair.commands
        if isinstance(each, PeerMessage) and isinstance(each.message, PeerJoined)
    )
    assert admitted.submits_jobs


@pytest.mark.parametrize(
    ("ours", "theirs", "binding", "reason"),
    [
        ("another token", TOKEN, b"one channel", WRONG_TOKEN),
        (TOKEN, "", b"one channel", NOT_PROVEN),  # an impostor, which admits anyone
        (TOKEN, TOKEN, b"", PLAIN),
    ],
)
def test_each_end_has_to_prove_the_token(
    ours: str, theirs: str, binding: bytes, reason: str
) -> None:
    pair = connect(dialled(ours), listening(theirs), binding)

    assert any(reason in each for each in pair.ends)
    assert not pair.events


def test_what_dials_a_worker_is_a_coordinator() -> None:
    coordinator = PROTOCOL.endpoints(Config(), fleet_context())[0]
    assert isinstance(coordinator, WebSocketRoute)

    pair = connect(dialled(), coordinator.accept(REQUEST, 0.0).session)

    assert any("another role" in each for each in pair.ends)


def test_a_second_worker_of_a_name_is_refused() -> None:
    context = fleet_context()
    config = Config(workers=("192.0.2.7:4010", "192.0.2.8:4010"))
    endpoints = PROTOCOL.endpoints(config, context)
    one, other = (e for e in endpoints if isinstance(e, OutgoingConnection))
    first = connect(one.new_session(0.0), listening())
    (route,) = worker_endpoints(
        Config(), replace(fleet_context(), name="gpu", admission=require_token(TOKEN))
    )
    assert isinstance(route, WebSocketRoute)

    second = connect(other.new_session(0.0), route.accept(REQUEST, 0.0).session)

    assert isinstance(first.events[0], PeerJoined)
    assert any(NAME_TAKEN in each for each in second.ends)
    assert not second.events


def test_a_pool_without_a_token_dials_no_workers() -> None:
    with pytest.raises(ConfigError, match="--join-token"):
        PROTOCOL.endpoints(CONFIG, fleet_context(""))
