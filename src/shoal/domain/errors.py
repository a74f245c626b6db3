"""The exceptions that Shoal raises, by the party at fault."""

from collections.abc import Mapping


class ShoalError(Exception):
    """Base class of all exceptions that Shoal raises."""


class PeerError(ShoalError):
    """The peer violated its protocol.  The connection is closed."""


class LimitExceeded(PeerError):
    """The peer exceeded a size limit."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes exceeds the limit of {limit}")
        self.size = size
        self.limit = limit


class ClientError(ShoalError):
    """The request is at fault: repeating it fails again."""


class InvalidRequest(ClientError):
    """The request is invalid; ``field`` names the invalid part."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Unprocessable(InvalidRequest):
    """The request is well-formed, and a model server cannot process its values."""


class CannotDo(InvalidRequest):
    """No worker with the model supports ``field``."""


class ContextExceeded(InvalidRequest):
    """The request exceeds the model's context."""


class KeyReused(ClientError):
    """The idempotency key belongs to a different request."""


class TooLarge(ClientError):
    """The request exceeds the size limit."""


class TooSlow(ClientError):
    """The request was not received completely in time."""


class Unauthorized(ClientError):
    """The request has no valid key."""


class KeyExpired(Unauthorized):
    """The key has expired."""


class KeyRevoked(Unauthorized):
    """The key was revoked."""


class SessionEnded(Unauthorized):
    """The browser is not signed in any more."""


class Forbidden(ClientError):
    """The key is valid but lacks the permission."""


class BudgetSpent(ClientError):
    """The rest of the key's token budget is too small."""


class InsufficientFunds(ClientError):
    """The account's budget does not cover the job."""


class PaymentDue(ClientError):
    """The request requires a payment; ``headers`` describe it."""

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class NotFound(ClientError):
    """The resource that the request names does not exist."""


class AlreadyEnded(ClientError):
    """The job has ended and can no longer be changed."""


class UnknownModel(NotFound):
    """No worker offers this model, or offered it recently."""


class UnknownTask(NotFound):
    """No worker offers this function, or offered it recently."""


class Unavailable(ShoalError):
    """A temporary condition: a retry after ``retry_after`` seconds may succeed."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PaymentsDown(Unavailable):
    """The payment service is unreachable, so no payment can be made."""


class RateLimited(Unavailable):
    """The key exceeded its rate per minute."""


class DaySpent(Unavailable):
    """The rest of the key's daily tokens is too small."""


class TooManyFailures(Unavailable):
    """The address has presented too many wrong keys or tokens."""


class NoWorker(Unavailable):
    """No worker became available before the job's time limit."""


class ModelLoading(NoWorker):
    """The same, because the model is still being loaded.

    ``loading`` says how far that is, see ``LoadState``.
    """

    def __init__(
        self, message: str, retry_after: int, loading: Mapping[str, object]
    ) -> None:
        super().__init__(message, retry_after)
        self.loading = loading


class EngineFailed(Unavailable):
    """The engine is short of memory, or broke, and may do the same later."""


class NotReady(Unavailable):
    """Something that the request needs is still being loaded."""


class QueueFull(Unavailable):
    """The queue is full."""


class WorkerLost(Unavailable):
    """The job's workers disconnected, and no other finished it."""


class TimedOut(Unavailable):
    """The job exceeded a time limit after a worker had accepted it."""


class NoFirstOutput(TimedOut):
    """The worker accepted the job and sent no output in time."""


class OutputStalled(TimedOut):
    """The worker's output stalled for too long."""


class TookTooLong(TimedOut):
    """The answer was incomplete at the job's total time limit."""


class StillRunning(Unavailable):
    """The job whose result was requested has not ended."""


class ShuttingDown(Unavailable):
    """The coordinator is shutting down and accepts no new jobs."""


class JobError(ShoalError):
    """The work itself failed; the message is the worker's.

    ``exception`` is the record of a function's exception (``shoal.tasks``); empty:
    there is none.
    """

    def __init__(self, message: str, exception: bytes = b"") -> None:
        super().__init__(message)
        self.exception = exception


class Cancelled(JobError):
    """The job was cancelled before it ended."""


class StoreError(ShoalError):
    """The database failed.

    ``path`` names the file or folder, for operators only.  ``temporary``: the same may
    succeed later, as on a disk that is full now, ``retry_after`` seconds from now.
    """

    retry_after = 30

    def __init__(self, reason: str, path: str = "", *, temporary: bool = False) -> None:
        super().__init__(reason)
        self.path = path
        self.temporary = temporary

    @property
    def located(self) -> str:
        """The reason with the path."""
        return f"{self.path}: {self}" if self.path else str(self)


class StoreBroken(StoreError):
    """The database is damaged or gone: neither a repetition nor a restart helps."""


class WentBack(StoreBroken):
    """The database lacks commits that it had confirmed."""


class InUse(StoreError):
    """Another coordinator has the database."""


class Fenced(StoreError):
    """Another coordinator has taken the database over: this one must stop."""


class ConfigError(ShoalError):
    """An option, environment variable or file has an unusable value."""


class NotAdmitted(ShoalError):
    """The worker's credentials do not admit it; the message is for its owner."""


class Refused(ShoalError):
    """A connection is rejected; ``code`` is the wire's close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Unsupported(AssertionError):
    """A session was given a command that its wire cannot express: a bug."""


def release_frames(error: BaseException | None) -> None:
    """Let go of the frames that an error has passed through, once it is answered.

    A frame that has its own error in a variable is a cycle.  Until the collector finds
    it, it keeps the request and its body, and a flood of rejected requests all of them.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
