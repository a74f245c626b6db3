"""The peers of a node: what they say, what they are told, and when they are gone."""

import re
from collections.abc import Sequence
from typing import TypeAlias

from shoal.domain.vocabulary import (
    Command,
    Conditioned,
    Dismiss,
    Draining,
    Event,
    Offered,
    Rejected,
    Reported,
)
from shoal.protocols.crowd import From, Met
from shoal.protocols.session import Bulk, Close, Notice, Output, Send
from shoal.protocols.tealenet.conversation import Word
from shoal.protocols.tealenet.node.guest import Guest
from shoal.protocols.tealenet.node.known import Acquaintance, Directory
from shoal.protocols.tealenet.node.sessions import Sessions
from shoal.protocols.tealenet.node.talk import Talk
from shoal.protocols.tealenet.node.timetable import Timetable
from shoal.protocols.tealenet.peer import Breed
from shoal.protocols.tealenet.relay.messages import RelayClose, RelayData, RelayReady

LINGERS = 60.0  # seconds for which who came to ask is remembered between two sessions
AGAIN_FIRST = 1.0  # seconds until a peer is called on again, and twice that next time
AGAIN_MAX = 60.0  # seconds
DISMISSED_FOR = 300.0  # seconds for which nobody whom we sent away is called on
ID_SHOWN = 16  # characters of a peer's id in notices

Heard: TypeAlias = From | Output

_NODE_ID = re.compile("[0-9a-f]{64}")


class Guests:
    """All peers of a node; what is returned is for the relay or for whoever listens.

    Sessions come up in ``times`` when they are to act, and guests without any.
    """

    def __init__(
        self, sessions: Sessions, directory: Directory, times: Timetable[Talk | Guest]
    ) -> None:
        self._sessions = sessions
        self._directory = directory
        self._times = times
        self._guests: dict[str, Guest] = {}
        self.owed: list[From] = []  # what was heard where things can only be said

    def find(self, node_id: str) -> Guest | None:
        """Return a peer that is there, or is to be called on again."""
        return self._guests.get(node_id)

    def begin(self, talk: Talk) -> None:
        """Take note of a session that has been opened."""
        guest = self._guests.setdefault(talk.peer_id, Guest(talk.peer_id))
        guest.talks.add(talk)
        self._times.set(talk, talk.deadline)

    def forget(self, guest: Guest) -> None:
        """Forget a peer that has gone."""
        del self._guests[guest.id]

    def make_room(self, now: float) -> list[Heard]:
        """End the oldest session of a peer that was not let in, if there are too many.

        Anybody can open sessions, and may not keep others from being let in by that.
        """
        talk = self._sessions.one_too_many
        if talk is None:
            return []
        closing = self._sessions.close(talk.peer_id, talk.id)
        return [closing, *self._ended(talk, "others want to be let in", now)]

    def describe(self, node: Acquaintance, now: float) -> list[Heard]:
        """Take what the relay tells of a peer."""
        guest = self._guests.get(node.id)
        if guest is None:
            return []
        if guest.main is None and node.breed is Breed.MAC:
            guest.main = guest.voice  # it came before it was known; it takes no other
        if guest.main is None:
            return []
        outputs = guest.main.describe(node.described, now)
        return self._heard(guest.main, outputs, now)

    def tick(self, talk: Talk, now: float) -> list[Heard]:
        """Let a session act on time passing, if it is time."""
        if talk.deadline is None or talk.deadline > now:
            self._times.set(talk, talk.deadline)
            return []
        return self._heard(talk, talk.tick(now), now)

    # What the relay says.

    def ready(self, message: RelayReady, now: float) -> list[Heard]:
        """Take note that a peer is ready."""
        talk = self._talk(message.from_node_id, message.session_id)
        return [] if talk is None else self._heard(talk, talk.ready(now), now)

    def data(self, batch: Sequence[RelayData], now: float) -> list[Heard]:
        """Take what was said in one session, from who says it to be itself."""
        talk = self._talk(batch[0].from_node_id, batch[0].session_id)
        if talk is None:
            return []
        said = [each.data for each in batch if each.from_node_id == talk.peer_id]
        return self._heard(talk, talk.receive(said, now), now)

    def closed(self, message: RelayClose, now: float) -> list[Heard]:
        """Take note that a peer has ended a session."""
        talk = self._talk(message.from_node_id, message.session_id)
        if talk is None:
            return []
        return self._ended(talk, "the peer ended the session", now)

    def left(self, node_id: str, reason: str, now: float) -> list[Heard]:
        """Take note that a peer is not there any more."""
        guest = self._guests.get(node_id)
        if guest is None:
            return []
        outputs: list[Heard] = [*guest.go(reason)]
        for talk in [*guest.talks]:
            outputs += self._ended(talk, reason, now)
        return outputs

    def missing(self, text: str, now: float) -> list[Heard]:
        """Take note that the relay does not know whom we talk to."""
        node_id = _NODE_ID.search(text)
        if node_id is None:
            return []
        return self.left(node_id[0], "the relay does not know it any more", now)

    # What is said to peers.

    def tell(self, peer: str, word: Event | Command, now: float) -> list[Output]:
        """Say something to one peer."""
        guest = self._guests.get(peer)
        if guest is None:
            return []  # it has gone meanwhile
        if isinstance(word, Dismiss):
            return self._dismiss(guest, word, now)
        talk = guest.talk_for(word)
        return [] if talk is None else self._issue(talk, word, now)

    def tell_all(self, word: Event | Command, now: float) -> list[Output]:
        """Say something of us to everybody, and to whoever comes later."""
        match word:
            case Offered() | Conditioned() | Draining() | Reported():
                self._sessions.said[type(word)] = word
            case _:
                raise AssertionError("nothing else is said to everybody")
        outputs: list[Output] = []
        for talk in self._sessions.all():
            outputs += self._issue(talk, word, now)
        return outputs

    # Private parts, in the order in which they are called.

    def _talk(self, peer_id: str, session_id: str) -> Talk | None:
        talk = self._sessions.find(session_id)
        return talk if talk is not None and talk.peer_id == peer_id else None

    def _heard(
        self, talk: Talk, outputs: Sequence[Word | Output], now: float
    ) -> list[Heard]:
        """Pass on what came out of a session."""
        heard: list[Heard] = []
        for each in outputs:
            match each:
                case Send(data):
                    heard.append(self._sessions.carry(talk, data))
                case Close(reason):
                    heard.append(self._sessions.close(talk.peer_id, talk.id))
                    heard += self._ended(talk, reason, now)
                case Bulk():
                    raise AssertionError("a relay carries messages, and no streams")
                case Notice(text):
                    heard.append(Notice(f"node {talk.peer_id[:ID_SHOWN]}: {text}"))
                case Met():
                    heard += self._met(talk, each, now)
                case word:
                    heard += self._word(talk, word, now)
        if not talk.over:
            self._times.set(talk, talk.deadline)
        return heard

    def _met(self, talk: Talk, met: Met, now: float) -> list[Heard]:
        guest = self._guests[talk.peer_id]
        self._sessions.met(talk)
        if talk.noise_key is not None:
            self._directory.meet(guest.id, talk.noise_key)
        main = self._may_be_main(guest, talk)
        outputs: list[Heard] = []
        if main and (older := guest.main) is not None:
            outputs.append(self._sessions.close(guest.id, older.id))
            outputs += self._ended(older, "it has begun anew", now)
        return [*outputs, *guest.meet(talk, met, main=main)]

    def _may_be_main(self, guest: Guest, talk: Talk) -> bool:
        node = self._directory.of(guest.id)
        if talk.begins or talk.noise_key is not None or node.breed is Breed.OURS:
            return True  # one of ours that opens another has forgotten the first
        # Gateways open one for each request; Macs keep theirs.
        return guest.main is None and node.breed is Breed.MAC

    def _word(self, talk: Talk, word: Word, now: float) -> Sequence[Heard]:
        heard = self._guests[talk.peer_id].hear(talk, word)
        if isinstance(heard, Rejected):
            return self._heard(talk, talk.issue(heard, now), now)
        return heard

    def _ended(self, talk: Talk, reason: str, now: float) -> list[Heard]:
        """Draw the consequences of a session's end; the peer knows of it."""
        talk.end(reason)
        self._sessions.end(talk)
        guest = self._guests[talk.peer_id]
        was_main = talk is guest.main
        outputs: list[Heard] = [*guest.part(talk, reason)]
        if was_main:
            for other in [*guest.talks]:
                outputs.append(self._sessions.close(guest.id, other.id))
                outputs += self._ended(other, reason, now)
        if talk.begins or was_main:
            guest.call_at = max(guest.call_at, now + _pause_after(guest.failures))
            guest.failures += 1
        if not guest.talks:
            guest.leave_at = now + LINGERS
            self._times.set(guest, min(guest.leave_at, max(now, guest.call_at)))
        return outputs

    def _dismiss(self, guest: Guest, word: Dismiss, now: float) -> list[Output]:
        guest.call_at = now + DISMISSED_FOR
        outputs: list[Output] = []
        for talk in [*guest.talks]:
            outputs += self._issue(talk, word, now)
            if not talk.over:
                outputs.append(self._sessions.close(guest.id, talk.id))
                self._split(self._ended(talk, word.reason, now))
        self._split(guest.go(word.reason))
        return outputs

    def _issue(self, talk: Talk, word: Event | Command, now: float) -> list[Output]:
        return self._split(self._heard(talk, talk.issue(word, now), now))

    def _split(self, heard: Sequence[Heard]) -> list[Output]:
        """Return what is to be said; what was heard is owed."""
        outputs: list[Output] = []
        for each in heard:
            if isinstance(each, From):
                self.owed.append(each)
            else:
                outputs.append(each)
        return outputs


def _pause_after(failures: int) -> float:
    """Return for how long a peer is left alone, in seconds."""
    return min(AGAIN_MAX, AGAIN_FIRST * 2.0 ** min(failures, 10))
