"""The session of every endpoint: each message names the peer that it is from or for.

A connection may be one worker (see ``sole_worker``), a peer that offers many models and
submits jobs as well, or a relay with many peers.  Where peers do both, the session is
the same for both ends.
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
    ``submits_jobs`` whether it may submit jobs.

    A ``sole_worker`` has the connection for itself: it is one worker of the pool, which
    has its name, and ``Joined`` with its offer comes next.  Of other peers each model
    is a worker, and ``OffersChanged`` lists them.
    """

    name: str
    cancels: bool = False
    submits_jobs: bool = False
    grant: AdmissionGrant = NO_JOIN_TOKEN
    protection: Protection = Protection.PLAIN
    sole_worker: bool = False


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer has left a connection that goes on."""

    reason: str


@dataclass(slots=True)
class PeerMessage:
    """A message from a peer.

    Its events are about jobs that it was given, and its commands are what it asks of
    us: the jobs in them are numbered by the peer.  Not frozen, for there is one for
    each token.
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
