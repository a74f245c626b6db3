"""A connection that carries pieces of answers past the coordinator's hub.

A worker opens it to the process that has a client's connection, and writes to it what
the client reads at once.  The connection to the coordinator carries all else, and the
same pieces a little later, in larger messages.

Messages are framed as on that one.  Both ends prove the ticket of a route, as they
prove a join token; see ``docs/protocols/shoal.md``.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from shoal.domain.errors import InvalidRequest, PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import TextRoute, TextSent
from shoal.protocols.seam import session
from shoal.protocols.seam.token_proof import PresentedProof, ProofRole, prove_token
from shoal.protocols.shoal.codec import MessageDecoder, Ping, encode
from shoal.protocols.shoal.streams import FRAME_MAX, IncomingStreams, OutgoingStreams

TEXT_PATH = "/shoal/text"
TEXT_VERSION = 1
TEXT_MAX = FRAME_MAX + 1024  # bytes of a WebSocket message, with what encrypts it
HELLO_TIMEOUT = 10.0  # seconds
HELLO_MAX = 1024  # bytes
ACKNOWLEDGED_AFTER = 0.5  # seconds after pieces have arrived
LOST_AFTER = 3.0  # seconds without an acknowledgement, after which it counts as cut
NAME_SIZE = 24  # bytes of the name of a route
WRONG_TICKET = "the other end has not proved the ticket"


def route_name(secret: bytes, front: bytes, job_id: JobId, lease: LeaseNumber) -> bytes:
    """Return the name of the route of a lease, which begins with its ``front``'s.

    ``secret`` is the pool's, of at most 64 bytes.
    """
    size = NAME_SIZE - len(front)
    lease_name = f"{job_id}/{lease}".encode()
    return front + blake2b(lease_name, digest_size=size, key=secret).digest()


def text_ticket(secret: bytes, name: bytes) -> bytes:
    """Return the ticket of a route, 32 bytes, by the pool's secret."""
    # Keyed, so no HMAC is needed (RFC 7693), which takes twice as long.
    return blake2b(name, digest_size=32, key=secret, person=b"shoal ticket").digest()


class TextHello(msgspec.Struct, frozen=True):
    """The first message of each end: proves the ticket of the route ``name``."""

    version: int
    name: bytes
    proof: bytes


_DECODER = MessageDecoder(frozenset({TextHello, TextSent}))


class _Frames:
    """The framing of one end."""

    def __init__(self) -> None:
        self._outgoing = OutgoingStreams()
        self._incoming = IncomingStreams(HELLO_MAX, self._outgoing.on_credit)

    def admit(self) -> None:
        """Take messages that are longer than a hello."""
        self._incoming.message_max = TEXT_MAX

    def written(self, message: object) -> session.Output:
        return self._outgoing.write((encode(message),))

    def read(self, batch: session.Batch) -> Iterator[object]:
        """Yield the messages in what has arrived.  Raises PeerError."""
        for pieces in batch:
            for data in self._incoming.receive(pieces):
                yield _DECODER.decode(data)


class TextSender:
    """The worker's end; it gives the other's ``TextHello`` once it has proved itself.

    It closes when what it has sent is not acknowledged in time: a connection that was
    cut takes what is written for minutes.
    """

    accepts: frozenset[type] = frozenset({TextSent})

    def __init__(self, route: TextRoute) -> None:
        self._route = route
        self._frames = _Frames()
        self._binding = b""
        self._opened = False
        self.deadline: float | None = None

    def bind(self, binding: bytes) -> None:
        """Record the binding of the encrypted connection."""
        self._binding = binding

    def tick(self, now: float) -> Sequence[TextHello | session.Output]:
        if self.deadline is None and not self._opened:
            self.deadline = now + HELLO_TIMEOUT
            return (self._hello(),)
        if self.deadline is None or now < self.deadline:
            return ()
        self.deadline = None
        what = "what was sent is not acknowledged" if self._opened else "no hello"
        return (session.Close(what),)

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[TextHello | session.Output]:
        hellos: list[TextHello] = []
        for message in self._frames.read(batch):
            self.deadline = None
            if isinstance(message, TextHello) and not self._opened:
                role, route = ProofRole.ACCEPTING, self._route
                if not _proves(message, route.ticket, role, self._binding):
                    return (session.Close(WRONG_TICKET),)
                self._opened = True
                hellos.append(message)
        return hellos

    def send(self, message: TextSent, now: float) -> Sequence[session.Output]:
        try:
            written = self._frames.written(message)
        except InvalidRequest:  # its copy says why, to the coordinator
            return ()
        if self.deadline is None:
            self.deadline = now + LOST_AFTER
        return (written,)

    def _hello(self) -> session.Output:
        route = self._route
        proof = prove_token(route.ticket, ProofRole.DIALLING, self._binding)
        return self._frames.written(TextHello(TEXT_VERSION, route.name, proof))


class TextReceiver:
    """The end with the client; it gives the worker's hello, once, and then its pieces.

    ``ticket_of`` returns the ticket of a route, by its name.
    """

    accepts: frozenset[type] = frozenset()

    def __init__(self, ticket_of: Callable[[bytes], bytes]) -> None:
        self._ticket_of = ticket_of
        self._frames = _Frames()
        self._binding = b""
        self._opened = False
        self.deadline: float | None = None

    def bind(self, binding: bytes) -> None:
        """Record the binding of the encrypted connection."""
        self._binding = binding

    def tick(self, now: float) -> Sequence[TextHello | TextSent | session.Output]:
        if self.deadline is None and not self._opened:
            self.deadline = now + HELLO_TIMEOUT
        elif self.deadline is not None and now >= self.deadline:
            self.deadline = None
            if not self._opened:
                return (session.Close("no hello"),)
            return (self._frames.written(Ping()),)
        return ()

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[TextHello | TextSent | session.Output]:
        outputs: list[TextHello | TextSent | session.Output] = []
        for message in self._frames.read(batch):
            if isinstance(message, TextSent) and self._opened:
                outputs.append(message)
                if self.deadline is None:
                    self.deadline = now + ACKNOWLEDGED_AFTER
            elif isinstance(message, TextHello) and not self._opened:
                outputs += self._on_hello(message)
            else:
                raise PeerError("not in this order")
        return outputs

    def _on_hello(self, hello: TextHello) -> Sequence[TextHello | session.Output]:
        if len(hello.name) != NAME_SIZE:
            raise PeerError(f"a name of {len(hello.name)} bytes")
        ticket = self._ticket_of(hello.name)
        if not _proves(hello, ticket, ProofRole.DIALLING, self._binding):
            code = session.CloseCode.POLICY_VIOLATION
            return (session.Close(WRONG_TICKET, code, WRONG_TICKET),)
        self._opened, self.deadline = True, None
        self._frames.admit()
        proof = prove_token(ticket, ProofRole.ACCEPTING, self._binding)
        answer = TextHello(TEXT_VERSION, hello.name, proof)
        return (hello, self._frames.written(answer))

    def send(self, message: object, now: float) -> Sequence[session.Output]:
        raise AssertionError("it only receives")


def _proves(hello: TextHello, ticket: bytes, role: ProofRole, binding: bytes) -> bool:
    """Return whether a hello proves a ticket, on an encrypted connection."""
    return bool(binding) and PresentedProof(hello.proof, role, binding).matches(ticket)
