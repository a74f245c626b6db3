"""Workers that know several coordinators of a pool, and learn more of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from protocols.calling import MEMBER, REQUEST, CallPair, fleet_context
from protocols.session_pair import Pair
from shoal.domain.errors import ConfigError
from shoal.ledger.keys import Signer, verify
from shoal.protocols.seam.context import Dialer, ProtocolContext, WorkerProfile
from shoal.protocols.seam.endpoints import WebSocketRoute
from shoal.protocols.seam.peer_session import ALL_PEERS, PeerJoined, ToPeer
from shoal.protocols.shoal import PROTOCOL
from shoal.protocols.shoal.session import ADDRESSES_MAX, ANOTHER_KEY

FIRST, SECOND, THIRD = (f"http://{name}:4010" for name in ("one", "two", "three"))
KNOWING = replace(MEMBER, verify=verify)


def wire_url(url: str) -> str:
    return f"noise+{url.replace('http', 'ws', 1)}/shoal"


def dialer_of(*urls: str, member: WorkerProfile = KNOWING) -> Dialer:
    return PROTOCOL.dial(urls[0], replace(member, addresses=urls[1:]))


def connect(
    dialer: Dialer, context: ProtocolContext, binding: bytes = b"b"
) -> CallPair:
    """Let the worker connect to a coordinator."""
    route = PROTOCOL.endpoints(PROTOCOL.config(), context)[0]
    assert isinstance(route, WebSocketRoute)
    session = route.accept(REQUEST, 0.0).session
    pair: CallPair = Pair(
        *(session, dialer.start_session({}), dialer, partial(ToPeer, ALL_PEERS)),
        binding,
        streams=False,
    )
    pair.begin()
    return pair


def naming(*urls: str) -> ProtocolContext:
    return replace(fleet_context(), addresses=lambda: urls)


def turns(dialer: Dialer, count: int) -> Sequence[str]:
    """Return where the worker dials, as one address after another fails."""
    found = []
    for _ in range(count):
        found.append(dialer.url)
        assert dialer.final_reason(1006, "") is None
    return found


def joined(pair: CallPair) -> bool:
    return any(isinstance(each, PeerJoined) for each in pair.events)


def test_the_given_addresses_are_dialled_in_turn() -> None:
    dialer = dialer_of(FIRST, SECOND)

    assert turns(dialer, 3) == [*map(wire_url, (FIRST, SECOND, FIRST))]
    assert turns(dialer_of(FIRST), 2) == [wire_url(FIRST)] * 2


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the coordinator's address"):
        dialer_of(FIRST, "http://")


def test_the_addresses_that_a_coordinator_names_are_dialled_too() -> None:
    dialer = dialer_of(FIRST)
    assert joined(connect(dialer, naming(FIRST, SECOND, THIRD)))

    assert turns(dialer, 4) == [*map(wire_url, (FIRST, SECOND, THIRD, FIRST))]


def test_there_only_the_same_pool_is_accepted() -> None:
    dialer = dialer_of(FIRST)
    connect(dialer, naming(SECOND))
    turns(dialer, 1)
    assert dialer.url == wire_url(SECOND)
    # It knows the token, too.
    other = replace(fleet_context(), identity=Signer.from_seed(bytes(32)))
    impostor = connect(dialer, other)
    assert ANOTHER_KEY in impostor.ends

    assert turns(dialer, 2) == [*map(wire_url, (SECOND, FIRST))]
    assert dialer.url == wire_url(SECOND)
    again = connect(dialer, naming(SECOND, THIRD), b"c")
    assert joined(again)
    assert ANOTHER_KEY not in again.ends
    assert turns(dialer, 3) == [*map(wire_url, (SECOND, THIRD, FIRST))]


def test_a_refusal_at_an_address_that_was_only_named_is_not_final() -> None:
    dialer = dialer_of(FIRST)
    connect(dialer, naming(SECOND))
    turns(dialer, 1)
    refusing = connect(dialer, fleet_context("another token"))
    assert not joined(refusing)

    assert turns(dialer, 3) == [*map(wire_url, (SECOND, FIRST, FIRST))]
    connect(dialer, fleet_context("another token"))
    assert dialer.final_reason(1000, "") is not None


def test_addresses_that_are_less_safe_are_not_noted() -> None:
    secure = "https://one:4010"
    dialer = dialer_of(secure)
    connect(dialer, naming(SECOND, "nonsense", "https://two:4010"))
    assert [each.partition("/shoal")[0] for each in turns(dialer, 3)] == [
        "noise+wss://one:4010",
        "noise+wss://two:4010",
        "noise+wss://one:4010",
    ]

    plain = dialer_of(FIRST, member=replace(KNOWING, plain=True))
    connect(plain, replace(naming(SECOND), plain=True), b"")
    assert len({*turns(plain, 3)}) == 1


def test_a_coordinator_names_few_addresses() -> None:
    dialer = dialer_of(FIRST)
    connect(dialer, naming(*(f"http://node{n}:4010" for n in range(100))))

    assert len({*turns(dialer, 200)}) == 1 + ADDRESSES_MAX
