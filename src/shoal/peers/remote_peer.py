"""A remote peer, which runs jobs for this coordinator and may submit jobs to it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.coordinator.connections import PeerRoute
from shoal.coordinator.hub import Hub
from shoal.domain import vocabulary as words
from shoal.domain.model_messages import ModelMessage, ModelQuery, refusal
from shoal.peers.inbound_jobs import InboundJobs, PeerJobPolicy, StartTask, WaitForRoom
from shoal.peers.peer_models import OfferRateLimiter, PeerModels
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage, ToPeer
from shoal.protocols.seam.session import CloseCode
from shoal.transports.driver import Driver

PENDING_MAX = 64  # messages held while the peer's admission is stored

PEER_COMMANDS: frozenset[type] = frozenset(
    {
        words.RunJob,
        words.Dismiss,
        words.WakeMachine,
        words.PushCalls,
        words.CancelCalls,
        words.SendBlob,
    }
)
"""The commands for every peer, if its wire can encode them."""

MAY_NOT_SUBMIT = (
    "this peer may not submit jobs here, because it was admitted as a worker: to "
    "submit jobs, it must present the passcode of the cluster"
)


class ModelSharing(Protocol):
    """Answers messages of peers about copies of models."""

    def on_message(
        self,
        peer: str,
        message: ModelMessage,
        send: Callable[[ModelMessage], bool],
        wait_for_room: WaitForRoom,
    ) -> None:
        """Process a message without waiting.

        ``peer`` identifies the peer.  ``send`` sends it a message, unless it has left,
        and ``wait_for_room`` waits until it has read most of what was sent.
        """

    def on_peer_joined(
        self,
        peer: str,
        send: Callable[[ModelMessage], bool],
        *,
        passed_on: bool = False,
    ) -> None:
        """Add a peer that may be asked for models.

        ``passed_on``: its models may be passed on to others, in chunks.
        """

    def on_peer_left(self, peer: str) -> None:
        """End the transfers of a peer that left."""


class NoModelSharing:
    """Answers that no models are available here."""

    def on_message(
        self,
        peer: str,
        message: ModelMessage,
        send: Callable[[ModelMessage], bool],
        wait_for_room: WaitForRoom,
    ) -> None:
        if (refused := refusal(message)) is not None:
            send(refused)

    def on_peer_joined(
        self,
        peer: str,
        send: Callable[[ModelMessage], bool],
        *,
        passed_on: bool = False,
    ) -> None:
        pass

    def on_peer_left(self, peer: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class PeerContext:
    """What all remote peers share."""

    hub: Hub
    sharing: ModelSharing
    policy: PeerJobPolicy
    offer_limiter: OfferRateLimiter


def peer_name(wire: str, joined: PeerJoined) -> str:
    """Return a peer's name, with its wire; a sole worker's is the worker's id."""
    name = joined.name
    if not joined.sole_worker:
        name = name.replace("%", "%25").replace("/", "%2F")
    return f"{wire}:{name}"


class RemotePeer:
    """A peer, from the time it joins until it leaves.

    ``name`` is its identity, ``key`` its key in the session, and ``start_task`` starts
    tasks of the connection.  ``on_change`` requests calls of ``rejoin_models``;
    ``on_left`` is called once, with the reason.  ``address`` is the URL at which it was
    dialled; empty if it dialled.
    """

    def __init__(
        self,
        context: PeerContext,
        wire: str,
        key: str,
        joined: PeerJoined,
        driver: Driver[PeerMessage, ToPeer],
        start_task: StartTask,
        on_change: Callable[["RemotePeer"], None],
        on_left: Callable[["RemotePeer", str], None],
        address: str = "",
    ) -> None:
        via = None
        if not joined.sole_worker:
            via = PeerRoute(joined.name, joined.protection)
        commands = (
            PEER_COMMANDS | {words.CancelJob} if joined.cancels else PEER_COMMANDS
        )
        self.name = peer_name(wire, joined)
        self.key = key
        self.address = address
        self.identity = joined
        self.accepts: frozenset[type] = driver.accepts & commands
        self.admitted = False
        self._approvals = context.hub.pool.approvals
        self._gets_models = False  # while it is approved
        self._blobs = context.hub.blobs
        self._sharing = context.sharing
        self._offer_limiter = context.offer_limiter
        self._driver = driver
        self._on_left = on_left
        self._closed = False
        self._pending: list[words.Event | words.Command] = []  # until it is admitted
        self._models = PeerModels(
            context.hub,
            wire,
            self.name.removeprefix(f"{wire}:"),
            via,
            self,
            lambda: on_change(self),
            joined.running,
            joined.grant.models,
        )
        self._inbound_jobs = InboundJobs(
            context.hub,
            self.name,
            context.policy,
            start_task,
            self._send,
            driver.wait_for_room,
            self,
        )

    def admit(self) -> None:
        """Admit the peer, and process the messages that were held."""
        self.admitted = True
        self._driver.admit()
        self.update_approval()
        pending, self._pending = self._pending, []
        for message in pending:
            self.on_message(message)

    @property
    def is_pending(self) -> bool:
        """Whether an operator has to approve the peer."""
        return self._approvals.is_pending(self.name, self.identity.public_key)

    def update_approval(self) -> None:
        """Exchange models with the admitted peer as long as it is approved."""
        approved, joined = not self.is_pending, self.identity
        if approved == self._gets_models:
            return
        self._gets_models = approved
        if not approved:
            self._sharing.on_peer_left(self.name)
        elif ModelQuery in self._driver.accepts:
            self._sharing.on_peer_joined(
                self.name,
                self._send,
                passed_on=joined.exclusive and joined.sends_chunks,
            )

    def on_message(self, message: words.Event | words.Command) -> None:
        """Process a message of the peer."""
        if not self.admitted:
            self._defer(message)
            return
        match message:
            case words.AnswerChunk():
                self._models.on_chunk(message)
            case words.Completed() | words.Rejected() | words.Failed():
                self._models.on_result(message)
            case words.ReceiptSent():
                self._models.on_receipt(message)
            case words.OffersChanged(offers):
                self._offer_limiter.submit(self.name, offers, self._models.on_offers)
            case words.LoadChanged(load):
                self._models.on_load(load)
            case words.Draining():
                self._models.on_draining(message)
            case words.HealthReported():
                self._models.broadcast(message)
            case words.RunJob(job_id, lease):
                if self.identity.submits_jobs:
                    self._inbound_jobs.start(message)
                else:
                    self._send(words.Rejected(job_id, lease, MAY_NOT_SUBMIT))
            case words.CancelJob():
                self._inbound_jobs.cancel(message)
            case words.WakeMachine():
                pass  # this machine calls none for its peers
            case words.Dismiss(reason):
                self.leave(f"dismissed by the peer: {reason}")
            case words.Joined(offer=offer):
                self._models.on_offers((offer,))
            case words.CallsReturned() | words.CallProgress():
                self._models.on_call_message(message)
            case words.SendBlob():
                self._blobs.receive(message)
            case words.BlobMissing(digest):
                self._blobs.resend(self, digest)
            case words.CallMessage():
                pass  # call streams are for Shoal's own workers
            case ModelMessage() if not self._gets_models:
                if (refused := refusal(message)) is not None:
                    self._send(refused)
            case ModelMessage():
                self._sharing.on_message(
                    self.name, message, self._send, self._driver.wait_for_bulk_room
                )

    def rejoin_models(self) -> bool:
        """Let idle models rejoin; return whether all are up to date."""
        return not self.admitted or self._models.rejoin()

    def leave(self, reason: str) -> None:
        """Remove the peer: it left, or is treated as if it had."""
        if self._closed:
            return
        self._closed = True
        self._pending.clear()
        if self.admitted:
            self.admitted = False
            self._inbound_jobs.close()
            if self._gets_models:
                self._sharing.on_peer_left(self.name)
            self._offer_limiter.on_peer_left(self.name)
            self._models.close(reason)
        self._on_left(self, reason)

    def dismiss(self, reason: str, *, replaced: bool = False) -> None:
        """Dismiss the peer; ``replaced`` is as in ``Dismiss``."""
        if not self._closed:
            self._driver.send(ToPeer(self.key, words.Dismiss(reason, replaced)))
            self.leave(reason)

    async def close(self, code: int, text: str) -> None:
        """Disconnect the peer, whose token was revoked."""
        if self.identity.sole_worker:
            self._driver.disconnect(text, code, text)
        else:
            self.dismiss(text)

    # From the hub.

    def send(self, message: words.Command) -> bool:
        """Send a command to the peer."""
        if isinstance(message, words.Dismiss):
            self.dismiss(message.reason, replaced=message.replaced)
            return True
        return self._send(message)

    def disconnect(self, reason: str, code: int, text: str) -> None:
        """Dismiss the peer; if the coordinator is going away, close its connection."""
        if code == CloseCode.GOING_AWAY:
            self._driver.disconnect(reason, code, text)
        else:
            self.dismiss(reason)

    def _defer(self, message: words.Event | words.Command) -> None:
        if self._closed:
            return
        if len(self._pending) >= PENDING_MAX:
            self.dismiss(
                f"sent more than {PENDING_MAX} messages before it was admitted"
            )
        else:
            self._pending.append(message)

    def _send(self, message: words.Event | words.Command) -> bool:
        return self.admitted and self._driver.send(ToPeer(self.key, message))
