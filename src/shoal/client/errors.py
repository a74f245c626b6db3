"""The exceptions that calls raise beside those of their functions."""

from shoal.domain.errors import ClientError, JobError, ShoalError, Unavailable


class RemoteTraceback(ShoalError):
    """The worker's traceback: the last ``__cause__`` of an exception of a call."""

    def __str__(self) -> str:
        # Formatted like concurrent.futures.process._RemoteTraceback.
        return f'\n"""\n{self.args[0]}"""'


def remote_traceback(error: BaseException) -> RemoteTraceback | None:
    """Return the worker's traceback of an exception; None: it is not of a function."""
    while (cause := error.__cause__) is not None:
        error = cause
    return error if isinstance(error, RemoteTraceback) else None


class TaskError(JobError):
    """A call failed on its worker, with an exception that cannot be rebuilt here.

    Attributes:
        traceback: the worker's, as text; empty if there is none.
        job_id: for ``shoal jobs explain``; empty if the call was not durable.
    """

    def __init__(self, message: str, traceback: str = "", job_id: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback
        self.job_id = job_id

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.traceback, self.job_id)


class TaskTimeout(TaskError, TimeoutError):
    """A call ran longer than its ``timeout``, or waited longer than its ``queue``."""


class CodeRefused(ClientError):
    """No worker can run a function that was sent.

    None was started with ``--trust-code``, or none has this version of Python.
    """


class PlainValuesOnly(ClientError):
    """The workers that have the function accept only the types of MessagePack."""


class ConnectionLost(Unavailable, ConnectionError):
    """The coordinator is unreachable, or the connection to it broke.

    Attributes:
        sent: whether the request may have had an effect.
        is_stopping: whether the coordinator said that it is about to stop.
        is_final: whether repeating it is useless, unless it worked before: for the
            name of the host or its certificate.
    """

    def __init__(
        self,
        message: str,
        *,
        sent: bool = True,
        is_stopping: bool = False,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.sent = sent
        self.is_stopping = is_stopping
        self.is_final = is_final
