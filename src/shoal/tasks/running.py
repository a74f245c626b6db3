"""Calls functions with arguments as they came, in a process that is there for that."""

import hashlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shoal.domain.errors import InvalidRequest, Unavailable
from shoal.tasks.importing import import_tasks
from shoal.tasks.limits import FUNCTIONS_MAX, RESULT_MAX
from shoal.tasks.reading import GetBlob, Reader, unpickled
from shoal.tasks.registry import TASKS, not_registered
from shoal.tasks.schemas import binder
from shoal.tasks.tracebacks import told
from shoal.tasks.values import NO_KWARGS, pack

if TYPE_CHECKING:
    import asyncio

RAISED, REFUSED, LACKING = range(3)
"""Why nothing came of a call: by itself, for what it is, or for what is not here."""


class Returned(NamedTuple):
    """What came of a call: a value in MessagePack, or why there is none."""

    value: bytes
    error: str = ""
    why: int = RAISED


Data: TypeAlias = bytes | memoryview
Step: TypeAlias = Callable[[Data, Data], Returned]
"""Makes one call of a function, with its arguments in MessagePack; never raises."""


def prepared(modules: list[str]) -> dict[str, float | None]:
    """Import modules; return their tasks by name, with the timeouts that they have.

    Raises ConfigError, with the traceback of what a module does when it is imported.
    """
    import_tasks(modules)
    return {name: task.timeout for name, task in TASKS.items()}


class Running:
    """The functions of this process.

    Args:
        blob: where large arguments are had; may raise Unavailable.
        trust: call functions that are sent along.
    """

    def __init__(self, blob: GetBlob, *, trust: bool) -> None:
        self._trust = trust
        self._reader = Reader(blob)
        self._code_reader = Reader(blob, unpickle=self._unpickle)
        self._functions: dict[bytes, Any] = {}  # that were sent along, by digest
        self._expecting = False  # whether what is unpickled next is the function
        self._steps: dict[str, Step] = {}
        self._loop: asyncio.Runner | None = None

    def step(self, name: str, *, code: bool) -> Step:
        """Return what calls a function.

        ``code``: it is the first of its arguments, and its name is for people alone.
        """
        if code:
            return self._sent_along if self._trust else _refusing(NOT_TRUSTED)
        if name not in self._steps:
            if name not in TASKS:
                return _refusing(not_registered(name))
            self._steps[name] = self._registered(name)
        return self._steps[name]

    def _registered(self, name: str) -> Step:
        task = TASKS[name]
        function, bind, read = self._blocking(task.function), binder(task), self._read

        def step(args: Data, kwargs: Data) -> Returned:
            given = read(self._reader, args, kwargs)
            if isinstance(given, Returned):
                return given
            positional, named = given
            # A task is somebody else's code, and may raise or end whatever it likes.
            try:
                if bind is not None:
                    positional, named = bind(positional, named)
                result = function(*positional, **named)
                return Returned(pack(result, "result", size_max=RESULT_MAX).data)
            except BaseException as error:
                return Returned(b"", told(error))

        return step

    def _sent_along(self, args: Data, kwargs: Data) -> Returned:
        self._expecting = True
        given = self._read(self._code_reader, args, kwargs)
        self._expecting = False
        if isinstance(given, Returned):
            return given
        positional, named = given
        try:
            function, *positional = positional
            result = self._blocking(function)(*positional, **named)
            packed = pack(result, "result", size_max=RESULT_MAX, pickles=True)
            return Returned(packed.data)
        except BaseException as error:
            return Returned(b"", told(error))

    def _read(
        self, reader: Reader, args: Data, kwargs: Data
    ) -> tuple[list[Any], dict[str, Any]] | Returned:
        try:
            positional = reader.read(args)
            named = {} if kwargs == NO_KWARGS else reader.read(kwargs)
            if type(positional) is list and type(named) is dict:
                return positional, named
            return Returned(b"", "the arguments are no list and no map", REFUSED)
        except InvalidRequest as error:
            return Returned(b"", str(error), REFUSED)
        except Unavailable as error:
            return Returned(b"", str(error), LACKING)
        except Exception as error:
            # What is unpickled runs code of its own.
            return Returned(b"", told(error))

    def _unpickle(self, data: memoryview) -> object:
        """Return what was pickled; a function is kept, for it mostly comes again."""
        if not self._expecting:
            return unpickled(data)
        self._expecting = False
        digest = hashlib.sha256(data).digest()
        function = self._functions.pop(digest, None)
        if function is None:
            function = unpickled(data)
        self._functions[digest] = function  # the latest is last
        if len(self._functions) > FUNCTIONS_MAX:
            del self._functions[next(iter(self._functions))]
        return function

    def _blocking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that returns its value, also for one that is awaited."""
        if not inspect.iscoroutinefunction(function):
            return function

        # Only here: with what it imports it is a fifth of what a process takes.
        import asyncio

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._loop is None:
                self._loop = asyncio.Runner()
            return self._loop.run(function(*args, **kwargs))

        return run


NOT_TRUSTED = (
    "a function that is sent along runs here only if that is trusted: start this "
    "worker with `shoal join --trust-code`, or register the function with @shoal.task"
)


def _refusing(why: str) -> Step:
    return lambda args, kwargs: Returned(b"", why, REFUSED)
