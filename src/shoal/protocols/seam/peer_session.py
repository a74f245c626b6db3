"""The session type of every endpoint: each message names its peer.

A connection may be one worker (see ``sole_worker``), a peer that offers many models and
also submits jobs, or a relay with many peers.  If peers offer and submit, both ends use
the same session.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from shoal.domain.vocabulary import Command, Event, RunningJobNames
from shoal.protocols.seam.admission import NO_JOIN_TOKEN, AdmissionGrant
from shoal.protocols.seam.session import PeerProfile, Session

ALL_PEERS = ""
"""The peer that stands for all peers of a connection."""


class Protection(Enum):
    """How messages to a peer are encrypted."""

    PLAIN = "plain"  # readable on the network
    NOISE = "noise"
    TEALE = "teale"  # the encrypted channel of some wires' own peers
    TLS = "tls"


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A peer joined and is authorized; the first message from it.

    ``name`` is its identity, unique within its wire: a newer peer replaces an older one
    of the same name.  ``cancels`` says whether it can cancel jobs, and ``submits_jobs``
    whether it may submit jobs.  ``respects_offers``: it knows Shoal's offers, and
    submits only the jobs that they accept.

    An ``exclusive`` peer serves this coordinator only.  The models of any other are not
    offered on its connection: neither to the peer itself, nor to the others of a relay,
    which can use it directly.

    ``address`` is the URL at which it was dialled; empty if it dialled.

    ``public_key`` is the key that it has proved, in hexadecimal; empty if none, or for
    a sole worker, whose offer has it.

    A peer that ``sends_chunks`` knows the messages about models in chunks, and so its
    models can be passed on to others.

    ``running`` is as in ``Joined``, of all its models.

    A ``sole_worker`` is the only peer of its connection: it is one worker of the pool,
    with the same name, and ``Joined`` with its offer comes next.  Each model of any
    other peer is a worker, and ``OffersChanged`` lists them.
    """

    name: str
    cancels: bool = False
    submits_jobs: bool = False
    grant: AdmissionGrant = NO_JOIN_TOKEN
    protection: Protection = Protection.PLAIN
    sole_worker: bool = False
    exclusive: bool = False
    respects_offers: bool = False
    sends_chunks: bool = False
    public_key: str = ""
    address: str = ""
    running: RunningJobNames | None = None


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """A peer is connected and may neither serve nor submit jobs.

    PeerLeft follows when it leaves, or PeerJoined when it is admitted after all.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDescribed:
    """A peer describes itself, or anew; it has joined, or was refused."""

    profile: PeerProfile


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A peer left; the connection stays open."""

    reason: str


class PeerMessage(msgspec.Struct):
    """A message from a peer.

    Its events are about jobs that it runs; its commands are about jobs that it submits,
    with job ids that the peer chose.  Not frozen, because there is one per token.
    """

    peer: str
    message: PeerJoined | PeerRefused | PeerDescribed | PeerLeft | Event | Command


class ToPeer(msgspec.Struct):
    """A message for one peer, or for ALL_PEERS.

    ``OffersChanged`` lists what this pool can run itself, and ``Dismiss`` removes the
    peer.  Not frozen, because there is one per token.
    """

    peer: str
    message: Event | Command


PeerSession: TypeAlias = Session[PeerMessage, ToPeer]
