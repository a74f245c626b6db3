"""The exceptions that Shoal raises, named for whose fault they are."""


class ShoalError(Exception):
    """Base class of all exceptions that Shoal raises."""


class PeerError(ShoalError):
    """The peer broke its protocol.  The connection cannot be trusted and is closed."""


class LimitExceeded(PeerError):
    """The peer sent more than is held for it."""

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(f"{what} of {size} bytes exceeds the limit of {limit}")
        self.size = size
        self.limit = limit


class ClientError(ShoalError):
    """The caller's fault: asking again the same way fails again."""


class InvalidRequest(ClientError):
    """The request makes no sense; ``field`` names the part that does not."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CannotDo(InvalidRequest):
    """No worker with the model can do what ``field`` asks for."""


class ContextExceeded(InvalidRequest):
    """The request is longer than the model can read."""


class KeyReused(ClientError):
    """The idempotency key stands for another request already."""


class TooLarge(ClientError):
    """The request is larger than is accepted."""


class TooSlow(ClientError):
    """The request did not come whole in time."""


class Unauthorized(ClientError):
    """The request carries no valid key."""


class KeyExpired(Unauthorized):
    """The key was good until it expired."""


class KeyRevoked(Unauthorized):
    """The key was good until it was revoked."""


class Forbidden(ClientError):
    """The key is good, but not for this."""


class BudgetSpent(ClientError):
    """What is left of the key's budget is not enough."""


class InsufficientFunds(ClientError):
    """The account's budget does not cover the job."""


class PaymentDue(ClientError):
    """The request has to come with a payment; ``headers`` say which."""

    def __init__(self, message: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class NotFound(ClientError):
    """What the request names does not exist."""


class AlreadyEnded(ClientError):
    """The job has ended, so that nothing about it can be changed."""


class UnknownModel(NotFound):
    """No worker has this model, and none had it lately."""


class UnknownTask(NotFound):
    """No worker has a function of this name, and none had it lately."""


class Unavailable(ShoalError):
    """Nobody's fault: the same request may work after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: int = 5) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PaymentsDown(Unavailable):
    """Whoever collects payments cannot be asked, so that nothing can be paid."""


class RateLimited(Unavailable):
    """The key has been used as much as it may be in a minute."""


class DaySpent(Unavailable):
    """What is left of the key's tokens for today is not enough."""


class TooManyFailures(Unavailable):
    """The address has presented too many wrong keys or tokens."""


class NoWorker(Unavailable):
    """No worker could take the job while it was allowed to wait."""


class QueueFull(Unavailable):
    """More jobs wait than the queue holds."""


class WorkerLost(Unavailable):
    """The workers that ran the job went away, and no other finished it."""


class TimedOut(Unavailable):
    """The job ran into one of its time limits after a worker had taken it."""


class NoFirstOutput(TimedOut):
    """The worker took the job and said nothing for too long."""


class OutputStalled(TimedOut):
    """The worker began to answer and then said nothing for too long."""


class TookTooLong(TimedOut):
    """The answer was not whole when the job's time in all was over."""


class StillRunning(Unavailable):
    """The job whose result was asked for has not ended."""


class ShuttingDown(Unavailable):
    """The coordinator takes no new jobs because it is stopping."""


class JobError(ShoalError):
    """The work itself failed; the message is the worker's."""


class Cancelled(JobError):
    """The job was cancelled before it ended."""


class StoreError(ShoalError):
    """The database failed; the hub takes no more work."""


class ConfigError(ShoalError):
    """A flag, variable or file says something that cannot be done."""


class NotAdmitted(ShoalError):
    """A worker may not join by what it presented; the message is for its owner."""


class Refused(ShoalError):
    """A connection is not accepted; ``code`` is what the wire closes it with."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Unsupported(AssertionError):
    """A session was asked for something its wire cannot express: a bug here."""
