"""Which peers are admitted, by what they present."""

from dataclasses import replace

import pytest

from protocols.contexts import require_token
from protocols.tealenet.network import local_coordinator
from shoal.domain.errors import NotAdmitted, TooManyFailures
from shoal.protocols.tealenet.admission import (
    PeerCredentials,
    admit,
    admits_anonymous,
)
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode

ADDRESS = "192.0.2.7"
HASH = passcode_hash("a passcode")


class Blocked:
    """A throttle that lets nobody present a passcode."""

    def check(self, address: str) -> None:
        pass

    def check_passcode(self, address: str) -> None:
        raise TooManyFailures("later")

    def failed(self, address: str) -> None:
        raise AssertionError("nothing was compared")


def with_passcode(*, weak: bool) -> TealeLocalNode:
    local = local_coordinator(admission=require_token("tok"))
    return replace(local, passcode=HASH, weak_passcode=weak, throttle=Blocked())


def test_a_weak_passcode_is_not_compared_while_others_guess_it() -> None:
    presented = PeerCredentials("p", passcode=HASH, address=ADDRESS)

    with pytest.raises(NotAdmitted, match="later"):
        admit(with_passcode(weak=True), presented)

    assert admit(with_passcode(weak=False), presented)


def test_peer_without_an_address_does_not_wait_for_those_that_guess() -> None:
    presented = PeerCredentials("p", passcode=HASH)

    assert admit(with_passcode(weak=True), presented)


@pytest.mark.parametrize(
    ("is_open", "presented", "admitted"),
    [
        (True, PeerCredentials("p"), False),
        (True, PeerCredentials("p", sends_hello=False), True),
        (False, PeerCredentials("p", sends_hello=False), False),
    ],
)
def test_passcode_is_required_unless_a_node_of_an_open_cluster_could_send_none(
    is_open: bool, presented: PeerCredentials, admitted: bool
) -> None:
    local = replace(local_coordinator(Config(open=is_open)), passcode=HASH)

    if admitted:
        assert admit(local, presented)
    else:
        with pytest.raises(NotAdmitted, match="requires a passcode"):
            admit(local, presented)


def test_peer_without_a_passcode_learns_what_to_do() -> None:
    local = local_coordinator(admission=require_token("tok"))

    with pytest.raises(NotAdmitted, match="--tealenet-passcode or --tealenet-open"):
        admit(local, PeerCredentials("p"))


def test_anonymous_nodes_are_admitted_where_nothing_is_required() -> None:
    assert admits_anonymous(local_coordinator(Config(open=True)))
    assert not admits_anonymous(local_coordinator(admission=require_token("tok")))
