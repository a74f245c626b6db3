"""Who we are in a fleet, and what nobody may say to us twice."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.protocols.macfleet.wire.hardware import Profile, write_profile
from shoal.protocols.macfleet.wire.keys import sign
from shoal.protocols.macfleet.wire.lines import NONCE_SIZE, Heard

SAID_MAX = 65_536  # signed lines that are remembered; the oldest is forgotten first


class Said:
    """The signed lines that were heard: each is good for one time.

    What was heard before the last start, or before so many others, is not known.
    """

    def __init__(self) -> None:
        self._proofs: OrderedDict[bytes, None] = OrderedDict()  # as they came

    def before(self, key: bytes, heard: Heard) -> bool:
        """Say whether a line was heard before, and remember it."""
        node_id, nonce, hardware = heard
        proof = sign(key, node_id.encode(), b" ", nonce, b" ", hardware or b"")
        if proof in self._proofs:
            return True
        self._proofs[proof] = None
        if len(self._proofs) > SAID_MAX:
            self._proofs.popitem(last=False)
        return False


@dataclass(frozen=True, slots=True)
class Member:
    """How we take part in a fleet.

    ``key`` is None in an open one.  ``profile`` is what we are made of: a call, for the
    port in it is known only when it is listened on.  ``draw`` returns that many random
    bytes.  ``pings`` and ``pongs`` are those that were heard.
    """

    node_id: str
    key: bytes | None
    profile: Callable[[], Profile]
    draw: Callable[[int], bytes]
    pings: Said = field(default_factory=Said)
    pongs: Said = field(default_factory=Said)

    def word(self, *, hardware: bool) -> Heard:
        """Return what we say of ourselves, with a nonce that was never used."""
        if self.key is None:
            return Heard(self.node_id)
        told = write_profile(self.profile()) if hardware else None
        return Heard(self.node_id, self.draw(NONCE_SIZE), told)
