"""Which sessions a node accepts, by the ids of the peer and of the session."""

import pytest

from protocols.tealenet.network import HOST, local_coordinator
from shoal.ledger.keys import Signer
from shoal.protocols.tealenet.relay_client.session import (
    ID_MAX,
    RelaySessions,
)

OWN = HOST.public_key.hex()
PEER = Signer.from_seed(b"p" * 32).public_key.hex()


@pytest.mark.parametrize(
    ("peer", "session", "accepted"),
    [
        (PEER, "s", True),
        (PEER, "s" * ID_MAX, True),
        (PEER, "s" * (ID_MAX + 1), False),
        (PEER, "", False),
        (OWN, "s", False),
        ("no key", "s", False),
    ],
)
def test_sessions_are_accepted_by_their_ids(
    peer: str, session: str, accepted: bool
) -> None:
    sessions = RelaySessions(local_coordinator(), HOST, str)

    assert sessions.can_accept(peer, session) is accepted
