"""A peer of a crowd: what it says is about its models' work, or asks for some."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.domain.sharing import ModelAnswer, ModelQuery, ModelWord
from shoal.domain.vocabulary import (
    Advanced,
    BlobLacked,
    CallsReturned,
    CallWord,
    CancelJob,
    Command,
    Completed,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Failed,
    GiveBlob,
    Joined,
    Offered,
    Presented,
    Progress,
    PushCalls,
    RecallCalls,
    Rejected,
    Reported,
    RunJob,
)
from shoal.protocols.crowd import From, Met, To
from shoal.runtime.driver import Driver
from shoal.runtime.hub import GOING_AWAY, Hub
from shoal.runtime.model_peers import ModelPeers
from shoal.runtime.neighbours import Begin, House, Neighbour, Room
from shoal.runtime.peers import Via
from shoal.runtime.restocking import Restocking

WORDS_MAX = 64  # said by a peer while it is stored that it was let in

HEARD: frozenset[type] = frozenset({RunJob, Dismiss, PushCalls, RecallCalls, GiveBlob})
"""What every peer may be told, if its wire can express it."""

MAY_NOT_ASK = (
    "this peer may not ask for work here, for it was let in as a worker: let it "
    "present the passcode of the cluster"
)


class Share(Protocol):
    """Answers what peers say about models to be copied."""

    def share(
        self,
        peer: str,
        word: ModelWord,
        say: Callable[[ModelWord], bool],
        room: Room,
    ) -> None:
        """Take a word, and never wait.

        ``peer`` tells peers apart.  ``say`` tells it something, unless it has gone, and
        ``room`` waits until it has read most of that.
        """
        ...

    def gone(self, peer: str) -> None:
        """Take note that a peer has left."""
        ...


class ShareNothing:
    """Says that there are no models to be copied here."""

    def share(
        self, peer: str, word: ModelWord, say: Callable[[ModelWord], bool], room: Room
    ) -> None:
        if isinstance(word, ModelQuery):
            say(ModelAnswer(word.model, available=False))

    def gone(self, peer: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Around:
    """What all peers have to do with."""

    hub: Hub
    share: Share
    house: House
    restocking: Restocking


class Guest:
    """A peer that was met, until it has left.

    ``name`` is its identity, ``key`` what its connection calls it, and ``begin`` starts
    tasks of the connection.  ``changed`` is called when ``renew`` is wanted, and
    ``left`` once with the reason.
    """

    def __init__(
        self,
        around: Around,
        wire: str,
        key: str,
        met: Met,
        driver: Driver[From, To],
        begin: Begin,
        changed: Callable[["Guest"], None],
        left: Callable[["Guest", str], None],
    ) -> None:
        quoted = met.name.replace("%", "%25").replace("/", "%2F")
        commands = HEARD | {CancelJob} if met.cancels else HEARD
        self.name = f"{wire}:{quoted}"
        self.key = key
        self.met = met
        self.accepts: frozenset[type] = driver.accepts & commands
        self.present = False
        self._blobs = around.hub.blobs
        self._share = around.share
        self._restocking = around.restocking
        self._driver = driver
        self._left = left
        self._gone = False
        self._unheard: list[Event | Command] = []  # until it is let in
        self._models = ModelPeers(
            around.hub,
            wire,
            quoted,
            Via(met.name, met.protection),
            self,
            lambda: changed(self),
        )
        self._neighbour = Neighbour(
            around.hub, self.name, around.house, begin, self._say, driver.room, self
        )

    def enter(self) -> None:
        """Let it in: what it has said since it was met counts from now on."""
        self.present = True
        unheard, self._unheard = self._unheard, []
        for word in unheard:
            self.heard(word)

    def heard(self, word: Event | Command) -> None:
        """Take what the peer says."""
        if not self.present:
            self._wait(word)
            return
        match word:
            case Progress():
                self._models.progress(word)
            case Completed() | Rejected() | Failed():
                self._models.ended(word)
            case Presented():
                self._models.presented(word)
            case Offered(offers):
                self._restocking.offered(self.name, offers, self._models.offered)
            case Conditioned(condition):
                self._models.conditioned(condition)
            case Draining():
                self._models.draining(word)
            case Reported():
                self._models.tell_all(word)
            case RunJob(job_id, lease):
                if self.met.asks:
                    self._neighbour.run(word)
                else:
                    self._say(Rejected(job_id, lease, MAY_NOT_ASK))
            case CancelJob():
                self._neighbour.cancel(word)
            case Dismiss(reason):
                self.leave(f"dismissed by the peer: {reason}")
            case Joined():
                pass  # it was met instead
            case CallsReturned() | Advanced():
                self._models.called(word)
            case GiveBlob():
                self._blobs.take(word)
            case BlobLacked(digest):
                self._blobs.give_again(self, digest)
            case CallWord():
                pass  # lanes are for our own workers
            case ModelWord():
                self._share.share(self.name, word, self._say, self._driver.room)

    def renew(self) -> bool:
        """Let models join anew that can by now; say whether all have."""
        return not self.present or self._models.renew()

    def leave(self, reason: str) -> None:
        """Take note that the peer has gone, or has to be taken as gone."""
        if self._gone:
            return
        self._gone = True
        self._unheard.clear()
        if self.present:
            self.present = False
            self._neighbour.close()
            self._share.gone(self.name)
            self._restocking.left(self.name)
            self._models.leave(reason)
        self._left(self, reason)

    def dismiss(self, reason: str) -> None:
        """Send the peer away."""
        if not self._gone:
            self._driver.issue(To(self.key, Dismiss(reason)))
            self.leave(reason)

    async def close(self, code: int, text: str) -> None:
        """Send the peer away, as one closes a link: its token was revoked."""
        self.dismiss(text)

    # From the hub.

    def issue(self, message: Command) -> bool:
        """Tell the peer something."""
        if isinstance(message, Dismiss):
            self.dismiss(message.reason)
            return True
        return self._say(message)

    def hang_up(self, reason: str, code: int, text: str) -> None:
        """Send the peer away; or end its connection, if everybody is to go for now."""
        if code == GOING_AWAY:
            self._driver.hang_up(reason, code, text)
        else:
            self.dismiss(reason)

    def _wait(self, word: Event | Command) -> None:
        if self._gone:
            return
        if len(self._unheard) >= WORDS_MAX:
            self.dismiss(f"said more than {WORDS_MAX} things before it was let in")
        else:
            self._unheard.append(word)

    def _say(self, word: Event | Command) -> bool:
        return self.present and self._driver.issue(To(self.key, word))
