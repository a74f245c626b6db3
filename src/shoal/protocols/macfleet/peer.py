"""What is known of the peer of a connection: before it says a word, and after."""

from dataclasses import dataclass

from shoal.protocols.crowd import BY_NO_TOKEN, Protection
from shoal.protocols.session import Pass


@dataclass(frozen=True, slots=True)
class Caller:
    """A peer that has not said anything yet.

    ``dialled``: we made the connection.  ``expected`` is the id that it must have then;
    empty: any.  ``ours`` says that it has to be one of ours, and so has to prove who it
    is as those do.  ``address`` has its port as well if it was us who dialled.
    """

    dialled: bool
    expected: str = ""
    ours: bool = False
    address: str = ""
    protection: Protection = Protection.PLAIN

    @property
    def host(self) -> str:
        """Where it is, without the port."""
        if not self.dialled:
            return self.address
        return self.address.rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that has shown who it is.

    ``ours``: it speaks our extension.  ``trusted``: it was let in by a token, and not
    because everybody is.  ``works``: it is there to work, and not to ask.
    ``public_key`` is proven, if there is one.
    """

    name: str
    ours: bool = False
    trusted: bool = False
    works: bool = False
    asks: bool = False
    admitted: Pass = BY_NO_TOKEN
    public_key: bytes = b""
