"""A call that somebody waits for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shoal.client import wire
from shoal.client.blobs import Blob
from shoal.client.options import Progress

OVERHEAD = 1 << 10  # bytes that a call takes beside its arguments, about

Ended: TypeAlias = Callable[[bytes | None, Exception | None], None]
"""Is told a call's value in MessagePack, or why there is none."""


@dataclass(slots=True, eq=False)
class Asked:
    """A call, and how far it has come; ``ended`` is told once what became of it.

    ``again`` says that it may be asked again after it was sent.
    """

    number: int
    name: str
    args: bytes
    kwargs: bytes
    options: wire.Options
    ended: Ended
    again: bool
    blobs: tuple[Blob, ...] = ()
    advanced: Progress | None = None
    sent: bool = False  # on the connection that there is now
    lacking: int = 0  # blobs that are still to be given
    gone: int = 0  # times that the coordinator had lost its blobs
    job_id: str = ""  # once it is accepted, if it is durable
    home: str = ""  # the module here that has the function
    coded: bool = False  # whether the function is sent along
    begun: bool = False  # whether a worker is known to have it

    @property
    def size(self) -> int:
        """How many bytes it takes here, without its blobs."""
        return len(self.args) + len(self.kwargs) + OVERHEAD

    def asked_before(self) -> None:
        """Have the coordinator look whether it knows the call from before."""
        if "fresh" in self.options:
            self.options = {**self.options, "fresh": False}

    @property
    def item(self) -> tuple[object, ...]:
        """What asks for it."""
        return wire.call(self.number, self.name, self.args, self.kwargs, self.options)
