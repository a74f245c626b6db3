"""Invokes functions with encoded arguments, in a task process."""

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shoal.domain.errors import InvalidRequest, Unavailable
from shoal.tasks import process_messages, values
from shoal.tasks.errors import format_task_error
from shoal.tasks.exception_record import encode_exception
from shoal.tasks.extension_types import is_extension
from shoal.tasks.limits import FUNCTIONS_MAX, RESULT_MAX
from shoal.tasks.process_messages import Mode
from shoal.tasks.registry import TASKS, import_tasks, unregistered_message
from shoal.tasks.running_call import set_openai_variables
from shoal.tasks.schemas import binder, result_converter, unused_hints
from shoal.tasks.sent_task import SentTask

if TYPE_CHECKING:
    import asyncio

RAISED, REFUSED, BLOB_MISSING = range(3)
"""Why a call failed: it raised, was refused, or lacked a blob."""


class InvocationResult(NamedTuple):
    """The result of a call: a value in MessagePack, or an error.

    If the function raised, ``value`` is the record of the exception.
    """

    value: bytes
    error: str = ""
    reason: int = RAISED

    def message(self, number: int) -> tuple[tuple[int, ...], bytes]:
        """Return the head and the tail of the message with this result."""
        if not self.error:
            return (process_messages.DONE, number), self.value
        text = self.error.encode()
        head = (process_messages.RAISED, number, self.reason, len(text))
        return head, text + self.value


Data: TypeAlias = bytes | memoryview
Invoke: TypeAlias = Callable[[Data, Data], InvocationResult]
"""Calls a function with arguments in MessagePack; never raises."""


def load_tasks(modules: list[str]) -> dict[str, float | None]:
    """Import modules; return the timeouts of their tasks, by name.

    Raises ConfigError with the traceback if an import fails.
    """
    import_tasks(modules)
    return {name: task.timeout for name, task in TASKS.items()}


def hint_remarks() -> list[str]:
    """Return a message for the worker's owner about the tasks' type hints."""
    return [
        f"{task.name}: the type hint of {name!r} cannot be used here (a name under "
        "TYPE_CHECKING, or a union that is ambiguous in JSON): callers in JSON get "
        "no conversion of this argument"
        for task in TASKS.values()
        if task.schema is None
        for name in unused_hints(task.function)
    ]


class FunctionInvoker:
    """The functions of this process.

    Args:
        blob: returns large arguments; may raise Unavailable.
        trust: whether to call functions that clients send.
    """

    def __init__(self, blob: values.GetBlob, *, trust: bool) -> None:
        self._trust = trust
        self._reader = values.ValueReader(blob)
        self._code_reader = values.ValueReader(blob, unpickle=self._unpickle)
        self._functions: dict[bytes, Any] = {}  # sent by clients, by digest
        self._expects_function = False  # whether the next pickle is the function
        self._invokers: dict[tuple[str, bool], Invoke] = {}
        self._runner: asyncio.Runner | None = None
        self._process = os.getpid()

    def invoker(self, name: str, mode: Mode) -> Invoke:
        """Return an ``Invoke`` for a function.

        With ``Mode.CODE``, the name is only a label.
        """
        exact = Mode.EXACT in mode
        if Mode.CODE in mode:
            if not self._trust:
                return _refuse(CODE_NOT_TRUSTED)
            return partial(self._invoke_sent_function, exact)
        if (name, exact) not in self._invokers:
            if name not in TASKS:
                return _refuse(unregistered_message(name))
            self._invokers[name, exact] = self._registered(name, exact)
        return self._invokers[name, exact]

    def _registered(self, name: str, exact: bool) -> Invoke:
        task = TASKS[name]
        function, read = self._blocking(task.function), self._read
        bind = binder(task, exact=exact)
        form = values.Form.EXACT if exact else values.Form.CONTENTS
        # The caller would convert it to the hint, as it does for other programs.
        marks = exact and result_converter(task.function) is not None

        def invoke(args: Data, kwargs: Data) -> InvocationResult:
            arguments = read(self._reader, args, kwargs)
            if isinstance(arguments, InvocationResult):
                return arguments
            positional, named = arguments
            try:
                if bind is not None:
                    positional, named = bind(positional, named)
                if task.openai:
                    set_openai_variables()
                result = function(*positional, **named)
                data = values.pack(
                    result, "result", size_max=RESULT_MAX, form=form
                ).data
                if marks and not is_extension(data):
                    data = values.mark_exact(data)
                self._end_fork()
                return InvocationResult(data)
            except BaseException as error:
                # A task is user code: it may raise anything, SystemExit included.
                return self._raised(error)

        return invoke

    def _invoke_sent_function(
        self, exact: bool, args: Data, kwargs: Data
    ) -> InvocationResult:
        self._expects_function = True
        arguments = self._read(self._code_reader, args, kwargs)
        self._expects_function = False
        if isinstance(arguments, InvocationResult):
            return arguments
        positional, named = arguments
        try:
            function, *positional = positional
            if isinstance(function, SentTask):
                bound, named = function.bind(positional, named, exact=exact)
                if function.openai:
                    set_openai_variables()
                result = self._blocking(function.function)(*bound, **named)
            else:
                result = self._blocking(function)(*positional, **named)
            form = values.Form.EXACT_OR_PICKLED
            packed = values.pack(result, "result", size_max=RESULT_MAX, form=form)
            self._end_fork()
            return InvocationResult(packed.data)
        except BaseException as error:
            # A function that was sent may raise anything, too.
            return self._raised(error, pickles=True)

    def _read(
        self, reader: values.ValueReader, args: Data, kwargs: Data
    ) -> tuple[list[Any], dict[str, Any]] | InvocationResult:
        try:
            positional = reader.read(args)
            named = {} if kwargs == values.NO_KWARGS else reader.read(kwargs)
            if type(positional) is list and type(named) is dict:
                return positional, named
            return InvocationResult(
                b"", "the arguments are neither a list nor a map", REFUSED
            )
        except InvalidRequest as error:
            return InvocationResult(b"", str(error), REFUSED)
        except Unavailable as error:
            return InvocationResult(b"", str(error), BLOB_MISSING)
        except Exception as error:
            # Unpickling runs arbitrary code.
            return self._raised(error)

    def _unpickle(self, data: memoryview, buffers: Sequence[Any]) -> object:
        """Unpickle a value; functions are cached, because most are called again."""
        if not self._expects_function:
            return values.load_pickle(data, buffers)
        self._expects_function = False
        digest = hashlib.sha256(data).digest()
        function = self._functions.pop(digest, None)
        if function is None:
            function = values.load_pickle(data)
        self._functions[digest] = function  # most recently used last
        if len(self._functions) > FUNCTIONS_MAX:
            del self._functions[next(iter(self._functions))]
        return function

    def _end_fork(self) -> None:
        """End a process that the function has forked, as the end of a script would.

        The call, and the pipes to the worker, are its parent's.
        """
        if os.getpid() != self._process:
            sys.exit()

    def _raised(
        self, error: BaseException, *, pickles: bool = False
    ) -> InvocationResult:
        if os.getpid() != self._process:
            raise error
        record = encode_exception(error, pickles=pickles)
        return InvocationResult(record, format_task_error(error))

    def _blocking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a blocking function; a coroutine function is wrapped."""
        if not inspect.iscoroutinefunction(function):
            return function

        # Imported late: asyncio is a fifth of the cost of a process.
        import asyncio

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(function(*args, **kwargs))

        return run


CODE_NOT_TRUSTED = (
    "this worker does not run functions sent by clients: start it with `shoal join "
    "--trust-code`, or register the function with @shoal.task"
)


def _refuse(reason: str) -> Invoke:
    return lambda args, kwargs: InvocationResult(b"", reason, REFUSED)
