"""One session through a relay: opened, protected, and then a conversation."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.vocabulary import Command, Event
from shoal.protocols.crowd import Met, Protection
from shoal.protocols.session import Bulk, Close, Data, Notice, Output, Send
from shoal.protocols.tealenet.conversation import Conversation, Word
from shoal.protocols.tealenet.encryption.secure import Carry, Ends, Heard, Secure, Step
from shoal.protocols.tealenet.peer import Described

READY_LIMIT = 4.0  # seconds for the peer to say that it is ready, as gateways have it
SILENT_MAX = 60.0  # seconds that who opened a session may take to say something

Converse: TypeAlias = Callable[[Protection, float], Conversation]
"""Begins a conversation, given who can read along, and the time."""

News: TypeAlias = Callable[[], Sequence[Event]]
"""Returns what every peer is told of us when a conversation begins."""


class Talk:
    """A session with one peer.  ``begins``: it was opened here.

    What it returns is for its node: a Send has what is to be carried to the peer, and
    a Close says that the session is over.
    """

    def __init__(
        self,
        ends: Ends,
        *,
        begins: bool,
        converse: Converse,
        news: News,
        now: float,
    ) -> None:
        self.id = ends.session_id
        self.peer_id = ends.peer_id
        self.begins = begins
        self.over = False
        self.met = False  # whether the peer was let in
        self.conversation: Conversation | None = None
        self._secure = Secure(ends, begins=begins)
        self._converse = converse
        self._news = news
        self._ready = not begins
        self._limit = now + (READY_LIMIT if begins else SILENT_MAX)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is next due."""
        if self.over:
            return None
        if self.conversation is not None:
            return self.conversation.deadline
        secure = self._secure.deadline
        return self._limit if secure is None else min(self._limit, secure)

    @property
    def noise_key(self) -> bytes | None:
        """The key for Noise that the peer turned out to have."""
        return self._secure.noise_key

    def ready(self, now: float) -> Sequence[Word | Output]:
        """Take note that the peer is ready to hear; once is enough."""
        if self._ready or self.over:
            return ()
        self._ready = True
        self._limit = now + SILENT_MAX
        return self._guarded(self._secure.open, now)

    def receive(self, batch: Sequence[bytes], now: float) -> Sequence[Word | Output]:
        """Take what the relay carried here, all that came together."""
        if self.over or not self._ready:
            return ()
        steps: list[Step] = []
        failure: PeerError | None = None
        try:
            for data in batch:
                steps += self._secure.receive(data, now)
        except PeerError as error:
            failure = error
        outputs = self._digest(steps, now)
        if failure is not None and not self.over:
            outputs.append(self.end(str(failure)))
        return outputs

    def issue(self, word: Event | Command, now: float) -> Sequence[Output]:
        """Say something; before the conversation has begun there is nobody to hear."""
        if self.over or self.conversation is None:
            return ()
        said = self.conversation.issue(word, now)
        return [each for output in said for each in self._sealed(output)]

    def describe(self, described: Described, now: float) -> Sequence[Word | Output]:
        """Take what the relay tells of the peer."""
        if self.over or self.conversation is None:
            return ()
        return self._outward(self.conversation.describe(described, now))

    def tick(self, now: float) -> Sequence[Word | Output]:
        """Act on time passing."""
        if self.over:
            return ()
        if self.conversation is not None:
            return self._outward(self.conversation.tick(now))
        if now >= self._limit:
            return (self.end(self._why_not()),)
        return self._guarded(self._secure.tick, now)

    def end(self, reason: str) -> Close:
        """End the session."""
        self.over = True
        return Close(reason)

    def _why_not(self) -> str:
        if not self._ready:
            return f"the peer was not ready within {READY_LIMIT:g} s"
        return f"the peer said nothing within {SILENT_MAX:g} s"

    def _guarded(
        self, act: Callable[[float], Sequence[Step]], now: float
    ) -> Sequence[Word | Output]:
        try:
            steps = act(now)
        except PeerError as error:
            return (self.end(str(error)),)
        return self._digest(steps, now)

    def _digest(self, steps: Sequence[Step], now: float) -> list[Word | Output]:
        outputs: list[Word | Output] = []
        heard: list[Data] = []
        for step in steps:
            match step:
                case Heard(data):
                    heard.append(data)
                case Carry(data):
                    outputs.append(Send(data))
                case Notice():
                    outputs.append(step)
        settled = self._secure.protection
        if self.conversation is None and settled is not None:
            self.conversation = self._converse(settled, now)
            outputs += self._outward(self.conversation.tick(now))
            for word in self._news():
                outputs += self.issue(word, now)
        if heard and self.conversation is not None and not self.over:
            outputs += self._outward(self.conversation.receive(heard, now))
        return outputs

    def _outward(self, said: Sequence[Word | Output]) -> list[Word | Output]:
        outputs: list[Word | Output] = []
        for each in said:
            if isinstance(each, Send | Close):
                outputs += self._sealed(each)
            else:
                self.met = self.met or isinstance(each, Met)
                outputs.append(each)
        return outputs

    def _sealed(self, output: Output) -> Sequence[Output]:
        match output:
            case Send(data):
                message = data if isinstance(data, bytes) else data.encode()
                try:
                    steps = self._secure.say(message)
                except PeerError as error:
                    return (self.end(str(error)),)
                return [Send(step.data) for step in steps if isinstance(step, Carry)]
            case Close(reason):
                return (self.end(reason),)
            case Bulk() | Notice():
                return (output,)
