"""The seam for wires on which one connection stands for several workers, or peers.

A peer there may offer many models, and it may ask as well as serve; and a relay brings
many peers over one connection.  So both ends are alike, and everything that is said
goes from or to a peer of the connection.  What is not said here is as in ``session``.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from shoal.domain.vocabulary import Command, Event
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.session import Session

ALL_PEERS = ""
"""The peer that stands for all peers of a connection."""


class Protection(Enum):
    """Who else can read what is said to a peer."""

    PLAIN = "plain"  # whoever carries it
    NOISE = "noise"
    TEALE = "teale"  # the encrypted channel of some wires' own peers
    TLS = "tls"


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer is there, and was let in.  The first that is heard of it.

    ``name`` is its identity, unique within its wire: of two peers with one name the
    newer takes the older's place.  ``cancels`` says whether it can be told to stop, and
    ``asks`` whether it may ask for work in its turn.
    """

    name: str
    cancels: bool = False
    submits_jobs: bool = False
    grant: AdmissionGrant = NO_JOIN_TOKEN
    protection: Protection = Protection.PLAIN


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer has left a connection that goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """What a peer says.

    Its events are about what we asked of it, and its commands are what it asks of us:
    the jobs in them are numbered by the peer.
    """

    peer: str
    message: PeerJoined | PeerLeft | Event | Command


@dataclass(slots=True)
class ToPeer:
    """A message for one peer, or for ALL_PEERS.

    ``OffersChanged`` lists what this pool can run itself.

    ``Dismiss`` ends what we have to do with the peer.  Not frozen, for there is one for
    each token.
    """

    peer: str
    message: Event | Command


MultiPeerSession: TypeAlias = Session[PeerMessage, ToPeer]
