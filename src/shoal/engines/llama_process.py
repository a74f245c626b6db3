"""The engine's end of the child process that runs llama.cpp."""

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from shoal.domain.errors import ConfigError, PeerError, Unavailable
from shoal.domain.outcome import AnswerPiece, Delta
from shoal.engines.answers import PieceBatch
from shoal.engines.llama_messages import (
    SIZE,
    AbortJob,
    AnswerEnded,
    FieldsPiece,
    JobRefused,
    LoadFailed,
    ModelOpened,
    OpenModel,
    StartJob,
    TextPiece,
    ToEngine,
    decode_to_engine,
    encode_message,
    message_size,
)
from shoal.processes.child import describe_exit

EXIT_LIMIT = 2.0  # seconds for a process to exit by itself, and again after SIGTERM
CLOSED = "the engine was closed"
LOG_MAX = 8192  # bytes of its standard error that are kept for error texts


class JobOutput:
    """The unread output of one job.

    Unread pieces are joined.  Their size is bounded: an answer ends when the context of
    its slot is full.
    """

    def __init__(self) -> None:
        self._unread = PieceBatch()
        self._end: AnswerEnded | JobRefused | Unavailable | None = None
        self._available = asyncio.Event()

    def put(self, item: AnswerPiece | AnswerEnded | JobRefused | Unavailable) -> None:
        if isinstance(item, str | Delta):
            self._unread.add(item)
        else:
            self._end = item
        self._available.set()

    async def read(self) -> list[AnswerPiece] | AnswerEnded | JobRefused:
        """Wait for output.  Raises Unavailable after the last of a lost process."""
        await self._available.wait()
        if pieces := self._unread.pieces():
            self._unread = PieceBatch()
            if self._end is None:
                self._available.clear()
            return pieces
        assert self._end is not None
        if isinstance(self._end, Unavailable):
            raise self._end
        return self._end


class LlamaProcess:
    """A running child process; its owner must always ``close`` it.

    ``loaded`` describes its model once that is loaded.  ``exit_reason`` is None while
    the process runs.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.exit_reason: str | None = None
        self.loaded: ModelOpened | None = None
        self.pid = process.pid
        self._process = process
        self._commands = process.stdin
        # Jobs stay here until the child reports their end, even after an abort: they
        # still hold a slot.
        self._jobs: dict[int, JobOutput] = {}
        self._last_id = 0
        self._settled = asyncio.Event()  # the model is loaded or cannot be
        self._load_failure: str | None = None
        self._closing = False
        self._log = b""
        # Run until the process ends; awaited in close().
        self._log_task = asyncio.create_task(self._read_log(process.stderr))
        self._reply_task = asyncio.create_task(self._receive_replies(process.stdout))

    @classmethod
    async def spawn(cls) -> "LlamaProcess":
        """Start a child without a model."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shoal.engines.llama_child"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
            )
        )

    @property
    def jobs(self) -> int:
        """Number of unfinished jobs."""
        return len(self._jobs)

    async def open(self, model: OpenModel) -> None:
        """Load the model.

        Raises ConfigError if llama.cpp cannot, and Unavailable if the process ends.
        """
        self._write(encode_message(model))
        await self._settled.wait()
        if self._load_failure is not None:
            raise ConfigError(self._load_failure)
        if self.exit_reason is not None:
            raise Unavailable(self.exit_reason)
        if self._closing:
            raise Unavailable(CLOSED)

    def run(self, job: StartJob) -> tuple[int, JobOutput]:
        """Start a job; return its assigned number and its output.

        Raises LimitExceeded if the job is too large to send.
        """
        self._last_id += 1
        command = encode_message(msgspec.structs.replace(job, id=self._last_id))
        answer = JobOutput()
        if self.exit_reason is not None:
            answer.put(Unavailable(self.exit_reason))
        else:
            self._jobs[self._last_id] = answer
            self._write(command)
        return self._last_id, answer

    def abort(self, id: int) -> None:
        """Abort a job, if it still runs."""
        if id in self._jobs:
            self._write(encode_message(AbortJob(id)))

    async def close(self) -> None:
        """End the process, killing it if necessary, and wait for its end."""
        self._closing = True
        self._commands.close()
        try:
            for send_signal in (self._process.terminate, self._process.kill):
                if await self._exits_soon():
                    break
                with contextlib.suppress(ProcessLookupError):
                    send_signal()
            await self._reply_task
        finally:
            if self._process.returncode is None:
                self._process.kill()
        with contextlib.suppress(OSError):
            await self._commands.wait_closed()

    def _write(self, data: bytes) -> None:
        """Send a command; after the end of the child it is dropped.

        There is no drain: the child reads at once, and the jobs are few.
        """
        if not self._commands.is_closing():
            self._commands.write(data)

    async def _receive_replies(self, replies: asyncio.StreamReader) -> None:
        """Handle the child's messages until it ends."""
        violation = ""
        try:
            while True:
                size = message_size(await replies.readexactly(SIZE.size))
                self._receive(decode_to_engine(await replies.readexactly(size)))
        except asyncio.IncompleteReadError:
            await self._exits_soon()
        except PeerError as error:
            violation = f"sent an invalid message: {error}"
        if self._process.returncode is None:
            self._process.kill()
        code = await self._process.wait()
        await self._log_task
        self._fail_all(violation or describe_exit(code))

    async def _read_log(self, errors: asyncio.StreamReader) -> None:
        while data := await errors.read(LOG_MAX):
            self._log = (self._log + data)[-LOG_MAX:]

    async def _exits_soon(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT):
                await self._process.wait()
        return self._process.returncode is not None

    def _receive(self, message: ToEngine) -> None:
        match message:
            case ModelOpened():
                self.loaded = message
                self._settled.set()
            case LoadFailed(reason):
                # The child exits after this, and its log has the details.
                self._load_failure = reason
            case TextPiece(id, text):
                self._jobs[id].put(text)
            case FieldsPiece(id, choice, fields, logprobs, reason):
                self._jobs[id].put(Delta(choice, fields, logprobs, reason))
            case AnswerEnded(id) | JobRefused(id):
                self._jobs.pop(id).put(message)

    def _fail_all(self, reason: str) -> None:
        """Fail all jobs and waiters: the process has ended."""
        log = self._log.decode(errors="replace")
        if self._load_failure is not None:
            self._load_failure = first_error(log) or self._load_failure
        if self._closing:
            self.exit_reason = CLOSED
        else:
            self.exit_reason = f"llama.cpp {reason}{last_unformatted_line(log)}"
        for answer in self._jobs.values():
            answer.put(Unavailable(self.exit_reason))
        self._jobs.clear()
        self._settled.set()


def first_error(log: str) -> str | None:
    """Return the first error in llama.cpp's log, the most specific one."""
    found = re.search(r"^\S+ E +[^:]*: (?:error loading model: )?(.*)$", log, re.M)
    return found[1] if found else None


def last_unformatted_line(log: str) -> str:
    """Return, after a colon, the last line that is not a regular log entry.

    It may be a failed assertion or a missing library.
    """
    lines = [line for line in log.splitlines() if not re.match(r"\S+ [IWE] ", line)]
    return f": {lines[-1].strip()}" if lines else ""
