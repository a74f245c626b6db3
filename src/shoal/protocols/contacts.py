"""Addresses that somebody has typed in, without saying which wire is spoken there.

A wire whose peers take offence at others' words has to be asked first: until it is,
the others wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.protocols.crowd import CrowdSession, From, Listed, Met, Outgoing, To
from shoal.protocols.session import Batch, Output

LOOK_EVERY = 1.0  # seconds until it is seen that a wire has asked


@dataclass(slots=True, eq=False)
class Contact:
    """HOST:PORT; ``wire`` is what is spoken there, once that is known.

    ``first`` has the wires that want to ask before others do, and have not yet.
    """

    address: str
    wire: str = ""
    first: set[str] = field(default_factory=set)

    def is_for(self, wire: str) -> bool:
        """Say whether a wire may call there now."""
        return self.wire == wire or not (self.wire or self.first - {wire})


class Contacting:
    """The ``Rounds`` of a wire that lets others ask first: it calls who is left.

    ``call`` says how an address is called.
    """

    def __init__(
        self, wire: str, contacts: Sequence[Contact], call: Callable[[str], Outgoing]
    ) -> None:
        self._wire = wire
        self._contacts = contacts
        self._call = call
        self._calling: dict[Contact, Outgoing] = {}
        self._due = float("-inf")

    @property
    def deadline(self) -> float | None:
        return self._due

    def tick(self, now: float) -> Sequence[Outgoing]:
        self._due = now + LOOK_EVERY
        return [
            self._called(each)
            for each in self._contacts
            if each not in self._calling and each.is_for(self._wire)
        ]

    def unwanted(self) -> Sequence[Outgoing]:
        taken = [each for each in self._calling if not each.is_for(self._wire)]
        return [self._calling.pop(each) for each in taken]

    def listed(self) -> Sequence[Listed]:
        return ()

    def _called(self, contact: Contact) -> Outgoing:
        usual = self._call(contact.address)

        def claim() -> None:
            contact.wire = self._wire

        called = Outgoing(
            usual.url,
            lambda now: _Claiming(usual.open(now), claim),
            usual.headers,
            usual.message_max,
            usual.fingerprint,
        )
        self._calling[contact] = called
        return called


class _Claiming:
    """A session that says so when it has met somebody."""

    def __init__(self, inner: CrowdSession, claim: Callable[[], None]) -> None:
        self._inner = inner
        self._claim = claim
        self.accepts = inner.accepts

    @property
    def deadline(self) -> float | None:
        return self._inner.deadline

    def tick(self, now: float) -> Sequence[From | Output]:
        return self._heard(self._inner.tick(now))

    def receive(self, batch: Batch, now: float) -> Sequence[From | Output]:
        return self._heard(self._inner.receive(batch, now))

    def issue(self, message: To, now: float) -> Sequence[Output]:
        return self._inner.issue(message, now)

    def _heard(self, said: Sequence[From | Output]) -> Sequence[From | Output]:
        if any(isinstance(each, From) and isinstance(each.word, Met) for each in said):
            self._claim()
        return said
