"""The session between a worker and a coordinator, or two pools, for both ends.

Each end says hello, with proofs over the encrypted channel's binding; who dialled goes
first.  From then on a worker and its coordinator each send their half of the vocabulary
as it is, and pools all of it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

from msgspec.structs import replace

from shoal import __version__
from shoal.domain import errors
from shoal.domain import vocabulary as words
from shoal.domain.addresses import is_loopback
from shoal.domain.credentials import digest_of
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.model_messages import CHUNK_MESSAGES, ChunkSent
from shoal.domain.outcome import Fault
from shoal.domain.work import Call, CallStream, Feature, Work
from shoal.domain.worker import (
    UNKNOWN_HARDWARE,
    Hardware,
    Offer,
    valid_hardware_addresses,
)
from shoal.protocols.seam import session
from shoal.protocols.seam.admission import (
    NO_JOIN_TOKEN,
    AdmissionCheck,
    AdmissionGrant,
    JoinRequest,
    NoThrottle,
    Throttle,
    TokenProof,
    proves_token,
)
from shoal.protocols.seam.answer_receipts import ReceiptSigner
from shoal.protocols.seam.context import Identity
from shoal.protocols.seam.peer_session import (
    ALL_PEERS,
    PeerDescribed,
    PeerJoined,
    PeerMessage,
    Protection,
    ToPeer,
)
from shoal.protocols.seam.token_proof import (
    NOT_PROVEN,
    PresentedProof,
    PresentedToken,
    ProofRole,
    prove_token,
)
from shoal.protocols.shoal import codec, streams

HELLO_TIMEOUT = 10.0  # seconds
PING_INTERVAL = 7.0  # seconds: two fit into a silence
SILENCE_MAX = 15.0  # seconds without a message until the other end counts as lost
HELLO_MAX = 64 << 10  # bytes of a message before admission
CLOSE_TEXT_MAX = 100  # characters
ADDRESSES_MAX = 32  # of the coordinators of a pool
ADDRESS_MAX = 256  # characters
KEY_LABEL = b"shoal key proof v1\n"
BLOB_REFERENCE = b"\xc7\x20\x02"  # in a value: MessagePack ext, 32 bytes, type 2
DIGEST_SIZE = 32  # bytes, which follow it

NAME_TAKEN = (
    "a machine of this name with another key is connected: choose another --name"
)
PLAIN = "workers encrypt their connections to this coordinator: join without --plain"
CONNECTED = "the two pools are connected already"
ITSELF = "the address is that of this pool itself"
WRONG_PASSCODE = "the pools have different passcodes: see --shoal-passcode"
ANOTHER_KEY = (
    "the coordinator's key is not the one that admitted this machine: it is an "
    "impostor, or it has a new data folder; then give its --token again"
)
WRONG_KEY = "the other end has not proved its key"
NO_CODE = (
    "code is sent only to workers that joined with a token, and run only for "
    "coordinators that proved it: this pool has no token, give --join-token"
)

PING_DATA = codec.encode(codec.Ping())  # most of what idle workers send
PING = streams.OutgoingStreams().write((PING_DATA,))
CALLS = (Call, CallStream)
ENDS = (words.CancelJob, words.Completed, words.Rejected, words.Failed)
WITH_VALUES = (words.RunJob, words.PushCalls, words.CallsReturned, words.Completed)
OF_JOBS = (
    *(
        words.RunJob,
        words.PushCalls,
        words.CancelCalls,
        words.AnswerChunk,
        words.CallProgress,
        words.CallsReturned,
    ),
    *ENDS,
)


class _Answer(NamedTuple):
    """An answer that this worker gives: to what, and its receipt."""

    work: Work
    signer: ReceiptSigner


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """What is the same for all sessions of this end.

    ``token`` is what this end proves, and the other has to: a worker's join token, or
    the passcode of a group of pools.  A worker without one that was admitted before
    proves its key, and expects the key of the ``coordinator``, in hexadecimal;
    ``on_coordinator`` gets the key of one that has proved the token.  ``admission`` is
    that of an end which accepts connections, and so are the last ``sessions``, by the
    other ends' names.
    ``models`` are those that a worker will offer once they are loaded.  ``on_refused``
    gets the reason of a final refusal.  ``epoch`` is the Unix time at which the clock
    passed as ``now`` was at 0.  ``addresses`` is as in ``ProtocolContext``, and a
    worker's ``on_addresses`` gets those, with the key that the coordinator has proved.
    ``wake`` is as in ``Offer``.
    """

    name: str
    identity: Identity | None
    is_worker: bool = True
    hardware: Hardware = UNKNOWN_HARDWARE
    plain: bool = False
    token: str = ""
    epoch: float = 0.0
    verify: Callable[[bytes, bytes, bytes], bool] | None = None
    coordinator: str = ""
    on_coordinator: Callable[[str], None] = lambda key: None
    admission: AdmissionCheck | None = None
    throttle: Throttle = NoThrottle()  # noqa: RUF009  # it has no state
    sessions: "WeakValueDictionary[str, ShoalSession]" = field(
        default_factory=WeakValueDictionary
    )
    offers: tuple[Offer, ...] = ()
    models: tuple[str, ...] = ()
    on_refused: Callable[[str], None] = lambda reason: None
    addresses: Callable[[], Sequence[str]] = tuple
    on_addresses: Callable[[Sequence[str], str], None] = lambda addresses, key: None
    wake: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The public key, in hexadecimal; empty if it has none."""
        return self.identity.public_key.hex() if self.identity else ""

    def is_connected(self, name: str, now: float) -> bool:
        """Return whether another end is connected under a name."""
        other = self.sessions.get(name)
        return other is not None and other.is_connected(now)


class ShoalSession:
    """One end of a connection.

    ``address`` is that of the other end: its URL, if this end ``dialled``.
    ``with_pool``: both ends are pools.  ``running`` is as in ``Opening``.  ``expected``
    is the key that a coordinator has to prove, also if it proves the token; empty: see
    ``LocalEnd.coordinator``.
    """

    def __init__(
        self,
        local: LocalEnd,
        address: str = "",
        *,
        dialled: bool = False,
        with_pool: bool = False,
        running: words.RunningJobNames | None = None,
        expected: str = "",
    ) -> None:
        self._expected = expected or ("" if local.token else local.coordinator)
        self._local = local
        self._running = running
        self._address = address
        self._dialled = dialled
        self._with_pool = with_pool
        self._binding = b""
        self._presented: PresentedProof | PresentedToken | None = None
        self._peer: codec.Opening | None = None
        self._key = ""  # the peer's, proven
        self._trusted = False  # it has proved the token
        self._submits = True  # it may submit jobs here
        self._outgoing = streams.OutgoingStreams()
        self._incoming = streams.IncomingStreams(HELLO_MAX, self._outgoing.on_credit)
        if with_pool:
            self.accepts, decoder = codec.EVENTS | codec.COMMANDS, codec.POOL_DECODER
        elif local.is_worker:
            self.accepts, decoder = codec.EVENTS, codec.COMMAND_DECODER
        else:
            self.accepts, decoder = codec.COMMANDS, codec.EVENT_DECODER
        self._decode = decoder.decode
        self._unsent: dict[type, words.Event | words.Command] = {
            words.OffersChanged: words.OffersChanged(local.offers)
        }
        self._jobs = {*(running or ())}  # the open ones
        self._answers: dict[tuple[JobId, LeaseNumber], _Answer] = {}  # given here
        self._last: dict[type, object] = {}  # what the peer said last of itself
        self._pending: list[PeerMessage] = []  # events that arose while sending
        self._pending_since = 0.0
        self._started = self._closed = False
        self._ping_at = self._lost_at = 0.0

    def bind(self, binding: bytes) -> None:
        """Record the binding of the encrypted connection."""
        self._binding = binding

    def is_connected(self, now: float) -> bool:
        """Return whether the peer is admitted, and heard."""
        return self._peer is not None and not self._closed and now < self._lost_at

    @property
    def deadline(self) -> float | None:
        if self._closed or not self._started:
            return None
        if self._pending:
            return self._pending_since
        pings = self._dialled and self._peer is not None
        return min(self._ping_at, self._lost_at) if pings else self._lost_at

    def tick(self, now: float) -> Sequence[PeerMessage | session.Output]:
        if self._closed:
            return ()
        if not self._started:
            self._started, self._lost_at = True, now + HELLO_TIMEOUT
            return [*self._greet()] if self._dialled else ()
        outputs: list[PeerMessage | session.Output] = [*self._pending]
        self._pending.clear()
        if now >= self._lost_at:
            what = "no hello" if self._peer is None else f"silent for {SILENCE_MAX:g} s"
            outputs.append(self._close(what))
        elif self._dialled and self._peer is not None and now >= self._ping_at:
            self._ping_at = now + PING_INTERVAL
            outputs.append(PING)
        return outputs

    def receive(
        self, batch: session.Batch, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        outputs: list[PeerMessage | session.Output] = []
        incoming = self._incoming
        self._outgoing.now = now
        try:
            for pieces in batch:
                for data in incoming.receive(pieces):
                    if not self._closed:
                        is_ping = data == PING_DATA
                        message = codec.Ping() if is_ping else self._decode(data)
                        outputs += self._receive_message(message, now)
            if incoming.unacknowledged and not self._closed:
                outputs.append(session.Send(incoming.acknowledge()))
            if self._peer is not None:
                self._lost_at = now + SILENCE_MAX
        except errors.PeerError as error:
            self._closed = True
            outputs.append(session.protocol_error(error))
        return outputs

    def send(self, message: ToPeer, now: float) -> Sequence[session.Output]:
        content = message.message
        if type(content) not in self.accepts:
            raise errors.Unsupported(f"no message for {type(content).__name__}")
        if self._closed:
            return ()
        if self._peer is None:
            # The state of this end is sent once a peer is admitted.
            self._unsent[type(content)] = content
            return ()
        if isinstance(content, words.Dismiss):
            dismiss = self._write(content)
            return (dismiss, self._close(content.reason))
        self._outgoing.now = now
        return self._encode(content, now)

    def connection_lost(self, now: float) -> Sequence[session.Output]:
        """Release the name for the next connection."""
        self._closed = True
        return ()

    # Sending.

    def _encode(
        self, content: words.Event | words.Command, now: float
    ) -> Sequence[session.Output]:
        if isinstance(content, words.RunJob):
            if not self._trusted and Feature.CODE in content.work.needs:
                refused = words.Rejected(content.job_id, content.lease, NO_CODE)
                return self._answer_itself(refused, now)
            # Another pool has credentials of its own for what it runs.
            if content.grant and (self._with_pool or not self._trusted):
                content = replace(content, grant="")
        if isinstance(content, words.OffersChanged):
            if not self._submits:
                return ()  # it could make nothing of them
            if wake := self._local.wake:
                offers = (replace(each, wake=wake) for each in content.offers)
                content = words.OffersChanged(tuple(offers))
        if type(content) in CHUNK_MESSAGES and not (self._peer and self._peer.chunks):
            return ()
        if not self._is_current(content):
            return ()
        if isinstance(content, words.AnswerChunk):
            answer = self._answers.get((content.job_id, content.lease))
            if answer is not None:
                answer.signer.add(content.pieces)
        elif isinstance(content, words.Completed | words.Rejected | words.Failed):
            content = self._with_receipt(content, now)
        try:
            return (self._write(content),)
        except errors.InvalidRequest as error:
            return self._fail(content, str(error), now)

    def _write(self, content: object) -> session.Send | session.Bulk:
        """Return what is sent of a message, in order where that matters.

        What refers to a large value must not overtake it, nor what is about a job
        overtake the rest, nor the end of a model its last part.

        Raises InvalidRequest, as ``codec.encode``.
        """
        outgoing = self._outgoing
        if type(content) is words.SendBlob:
            return outgoing.write(_parts(content), content.digest)
        if type(content) is ChunkSent:
            return outgoing.write(_parts(content))
        data = codec.encode(content)
        if isinstance(content, OF_JOBS):
            after: list[bytes] = []
            if outgoing.waiting and isinstance(content, WITH_VALUES):
                after = _digests_in(data)
            return outgoing.write((data,), (content.job_id, content.lease), after)
        key = getattr(content, "transfer_id", None)
        return outgoing.write((data,), key)

    def _is_current(self, message: object) -> bool:
        """Say whether a message is about no job, or one that is open; track those."""
        if not isinstance(message, OF_JOBS):
            return True
        job = (message.job_id, message.lease)
        if isinstance(message, words.RunJob):
            self._jobs.discard((message.job_id, message.resumes))
            self._jobs.add(job)
        elif isinstance(message, ENDS):
            is_open = job in self._jobs
            self._jobs.discard(job)
            return is_open
        return job in self._jobs

    def _with_receipt(
        self, event: words.Completed | words.Rejected | words.Failed, now: float
    ) -> words.Event:
        """Sign an answer that this worker gives, at its end."""
        answer = self._answers.pop((event.job_id, event.lease), None)
        if answer is None or not isinstance(event, words.Completed):
            return event
        if event.rest:
            answer.signer.add(event.rest)
        at = now + self._local.epoch
        return replace(event, receipt=answer.signer.sign(answer.work, event, at))

    def _fail(
        self, content: words.Event | words.Command, reason: str, now: float
    ) -> Sequence[session.Output]:
        """Let the job fail that a message is about, which cannot be written."""
        if not isinstance(content, words.RunJob | words.AnswerChunk | words.Completed):
            return ()
        job = (content.job_id, content.lease)
        failed = words.Failed(*job, reason, Fault.REQUEST)
        if isinstance(content, words.RunJob):
            self._jobs.discard(job)
            return self._answer_itself(failed, now)
        self._jobs.add(job)
        return self._encode(failed, now)

    def _answer_itself(
        self, event: words.Rejected | words.Failed, now: float
    ) -> Sequence[session.Output]:
        """Report an event in place of the peer, at the next tick."""
        self._pending.append(PeerMessage(ALL_PEERS, event))
        self._pending_since = now
        return ()

    # Opening.

    def _greet(self) -> Iterable[session.Output]:
        yield self._write(self._hello())
        yield self._write(self._local.hardware)

    def _hello(self) -> codec.Opening:
        local, binding = self._local, self._binding
        # The accepting end proves only the token that the other has proved.
        token = local.token if self._dialled else ""
        digest = digest_of(token) if token else b""
        if self._presented is not None:
            digest = self._presented.digest
        role = ProofRole.DIALLING if self._dialled else ProofRole.ACCEPTING
        identity = local.identity if binding else None
        return codec.Opening(
            codec.VERSION,
            local.name,
            local.is_worker,
            identity.public_key if identity else b"",
            identity.sign(KEY_LABEL + role.value + binding) if identity else b"",
            prove_token(digest, role, binding) if binding and digest else b"",
            "" if binding else token,
            [*local.models],
            __version__,
            streams.WINDOW,
            None if self._running is None else [*self._running],
            [*self._local.addresses()][:ADDRESSES_MAX],
            True,
        )

    def _on_hello(
        self, hello: codec.Opening, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        local = self._local
        if 0 < hello.window < streams.PIECE_MAX:
            raise errors.PeerError(f"a window of {hello.window} bytes is too small")
        if hello.is_worker is (local.is_worker or self._with_pool):
            raise errors.PeerError("the other end has another role than its path says")
        grant = NO_JOIN_TOKEN
        outputs: list[PeerMessage | session.Output] = []
        if self._dialled:
            if not self._proves_token(hello):
                return (self._close(NOT_PROVEN, session.CloseCode.POLICY_VIOLATION),)
            try:
                self._key = self._proven_key(hello, ProofRole.ACCEPTING)
            except errors.NotAdmitted as error:
                return (self._close(str(error)),)
            expected = self._expected
            if expected and self._key != expected:
                return (self._close(ANOTHER_KEY),)
            self._trusted = bool((local.token or expected) and self._binding)
            if self._with_pool:
                local.sessions[hello.name] = self
            elif not local.is_worker:
                try:
                    self._check_name(hello.name, now)
                except errors.NotAdmitted as error:
                    return (self._close(str(error)),)
                local.sessions[hello.name] = self
            else:
                local.on_addresses(hello.addresses, self._key)
                if local.token and self._key:
                    local.on_coordinator(self._key)
        else:
            try:
                grant = self._admit(hello, now)
            except (errors.NotAdmitted, errors.Unavailable) as error:
                refused = codec.Refusal(
                    str(error), isinstance(error, errors.NotAdmitted)
                )
                close = self._close(f"{hello.name!a} is refused: {error}")
                return (self._write(refused), close)
            outputs += self._greet()
        self._peer = hello
        running = None if self._with_pool else hello.running
        self._jobs.update(running or ())
        self._outgoing.window = hello.window
        self._incoming.message_max, self._incoming.window = (
            streams.MESSAGE_MAX,
            streams.WINDOW,
        )
        self._ping_at = now + PING_INTERVAL
        joined = PeerJoined(
            hello.name,
            cancels=True,
            submits_jobs=self._submits,
            grant=grant,
            protection=Protection.NOISE if self._binding else Protection.PLAIN,
            exclusive=hello.is_worker,
            respects_offers=True,
            sends_chunks=hello.chunks,
            public_key=self._key,
            address=self._address if self._dialled else "",
            running=None if running is None else (*running,),
        )
        outputs.append(PeerMessage(ALL_PEERS, joined))
        outputs.append(self._described(None))
        unsent, self._unsent = self._unsent, {}
        for each in unsent.values():
            if type(each) in self.accepts:
                outputs += self._encode(each, now)
        return outputs

    def _proves_token(self, hello: codec.Opening) -> bool:
        """Return whether the coordinator has this worker's token, if it has one.

        It cannot be proved on an unencrypted connection.
        """
        token, binding = self._local.token, self._binding
        if not token or not binding:
            return True
        proof = PresentedProof(hello.token_proof, ProofRole.ACCEPTING, binding)
        return proof.matches(digest_of(token))

    def _proven_key(self, hello: codec.Opening, role: ProofRole) -> str:
        """Return the key that the other end has proved; empty: it has not shown any.

        Raises NotAdmitted.
        """
        verify = self._local.verify
        if verify is None or not (hello.key and self._binding):
            return ""
        signed = KEY_LABEL + role.value + self._binding
        if not verify(hello.key, hello.key_proof, signed):
            raise errors.NotAdmitted(WRONG_KEY)
        return hello.key.hex()

    def _admit(self, hello: codec.Opening, now: float) -> AdmissionGrant:
        """Check the dialling end's proofs.  Raises NotAdmitted, and Unavailable."""
        local, binding = self._local, self._binding
        assert local.admission is not None, "this end accepts connections"
        if not binding and not local.plain and not is_loopback(self._address):
            raise errors.NotAdmitted(PLAIN)
        if self._with_pool and local.token:
            local.throttle.check(self._address)
        self._key = self._proven_key(hello, ProofRole.DIALLING)
        token: str | TokenProof = ""
        if binding and hello.token_proof:
            self._presented = PresentedProof(
                hello.token_proof, ProofRole.DIALLING, binding
            )
        elif hello.token:
            self._presented = PresentedToken(hello.token)
        if self._presented is not None:
            token = TokenProof(self._presented.matches)
        knows_passcode = self._with_pool and bool(local.token)
        knows_passcode = knows_passcode and proves_token(token, local.token)
        self._submits = knows_passcode or local.is_worker
        grant = NO_JOIN_TOKEN
        if not knows_passcode:
            # A pool with a join token only serves, as a worker.
            request = JoinRequest(
                token, hello.name, frozenset(hello.models), self._address, self._key
            )
            grant = local.admission(request)
            if token and self._is_guess() and self._with_pool and local.token:
                local.throttle.failed(self._address)
                raise errors.NotAdmitted(WRONG_PASSCODE)
        self._check_name(hello.name, now)
        local.sessions[hello.name] = self
        # By a token, or by the key that joined with one.
        self._trusted = bool(binding) and (not self._is_guess() or bool(grant.token_id))
        return grant

    def _is_guess(self) -> bool:
        """Return whether no secret is known that the other end has."""
        return self._presented is None or not self._presented.digest

    def _check_name(self, name: str, now: float) -> None:
        """Raise NotAdmitted if a name is another's, or Unavailable if it is connected.

        Of the connections that two pools make to each other, that of the pool with the
        smaller key stays.
        """
        local = self._local
        if self._with_pool and self._key == local.key:
            raise errors.NotAdmitted(ITSELF)
        other = local.sessions.get(name)
        if other is None or not other.is_connected(now):
            return
        if other._key != self._key:
            raise errors.NotAdmitted(NAME_TAKEN)
        if other._dialled and local.key < self._key:
            raise errors.Unavailable(CONNECTED)

    def _described(self, hardware: Hardware | None) -> PeerMessage:
        assert self._peer is not None, "the peer has said hello"
        profile = session.PeerProfile(
            self._peer.name, hardware, release=self._peer.release
        )
        return PeerMessage(ALL_PEERS, PeerDescribed(profile))

    # What the peer says.

    def _receive_message(
        self, message: object, now: float
    ) -> Sequence[PeerMessage | session.Output]:
        local = self._local
        if isinstance(message, codec.Opening):
            if self._peer is not None:
                raise errors.PeerError("a second hello")
            return self._on_hello(message, now)
        if isinstance(message, codec.Refusal) and self._peer is None:
            if message.final:
                self._local.on_refused(message.reason)
            return (self._close(message.reason, session.CloseCode.POLICY_VIOLATION),)
        if self._peer is None:
            raise errors.PeerError("a message before hello")
        if not self._is_current(message):
            return ()
        match message:
            case words.RunJob(job_id, lease, work) if (
                not self._trusted and Feature.CODE in work.needs
            ):
                return self._encode(words.Rejected(job_id, lease, NO_CODE), now)
            case words.RunJob(job_id, lease, work) if not isinstance(work, CALLS):
                signer = ReceiptSigner(local.identity, job_id, message.beginning)
                self._answers[job_id, lease] = _Answer(work, signer)
            case words.CancelJob(job_id, lease):
                self._answers.pop((job_id, lease), None)
            case words.OffersChanged() | words.LoadChanged() | words.Draining():
                if isinstance(message, words.OffersChanged):
                    message = words.OffersChanged(
                        tuple(map(self._proven, message.offers))
                    )
                if self._last.get(type(message)) == message:
                    return ()
                self._last[type(message)] = message
            case codec.Ping():  # who dialled pings, the other answers
                return () if self._dialled else (PING,)
            case Hardware():
                return (self._described(message),)
            case words.Dismiss(reason):
                self._local.on_refused(reason)
                return (PeerMessage(ALL_PEERS, message), self._close(reason))
            case _:
                pass
        return (PeerMessage(ALL_PEERS, message),)  # type: ignore[arg-type]

    def _proven(self, offer: Offer) -> Offer:
        """Return an offer with what the worker has proved, whatever it claims.

        There are receipts for what models answer, and none for values of functions.
        """
        return replace(
            offer,
            receipts=bool(offer.models),
            public_key=self._key or offer.public_key,
            proven=bool(self._key),
            neighbour=self._with_pool,
            wake=valid_hardware_addresses(offer.wake),
            remark="",
        )

    def _close(
        self, reason: str, code: session.CloseCode = session.CloseCode.NORMAL
    ) -> session.Close:
        self._closed = True
        return session.Close(reason, code, reason[:CLOSE_TEXT_MAX])


def _parts(content: words.SendBlob | ChunkSent) -> Sequence[bytes | memoryview]:
    """Return a message in parts; a large value is one of them."""
    if len(content.data) <= streams.SMALL_MAX:
        return (codec.encode(content),)
    # In place of an empty value, the head of one that follows.
    head = codec.encode(replace(content, data=b"")).removesuffix(b"\xc4\0")
    return (head, b"\xc6" + len(content.data).to_bytes(4), content.data)


def _digests_in(data: bytes) -> list[bytes]:
    """Return the digests of large values to which a message may refer."""
    digests, at = [], data.find(BLOB_REFERENCE)
    while at >= 0:
        at += len(BLOB_REFERENCE)
        digests.append(data[at : at + DIGEST_SIZE])
        at = data.find(BLOB_REFERENCE, at)
    return digests
