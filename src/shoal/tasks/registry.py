"""Which functions are tasks, and under which names (``@shoal.task``)."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar, overload

from shoal.domain.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

NAME_MAX = 256  # characters
_MARK = "__shoal_task__"


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """A function that is a task.

    ``schema`` is a model that it takes one of, and ``timeout`` for how many seconds it
    may run if its caller does not say; None: as long as the job may.
    """

    name: str
    function: Callable[..., Any]
    schema: type | None = None
    timeout: float | None = None


TASKS: dict[str, RegisteredTask] = {}
"""The tasks of this process, by name."""


@overload
def task(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def task(
    *, name: str = "", schema: type | None = None, timeout: float | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    schema: type | None = None,
    timeout: float | None = None,
) -> Any:
    """Make a function a task, which can be called by name on workers with its module.

    Use it as ``@shoal.task`` or ``@shoal.task(timeout=60)``.  The function itself does
    not change: a direct call runs it here.

    Args:
        function: a function at the top of its module.
        name: name of the task, at most 256 printable characters.  Default: the names of
            the module and the function, such as ``sums.add``.
        schema: class of the function's one parameter: a Pydantic model, a dataclass or
            a Struct.  The worker builds it from the dictionary or the keyword arguments
            of the call.
        timeout: seconds that a call may run if the caller sets no timeout.

    Returns:
        The function, or without one a decorator.

    Raises:
        ConfigError: another function has the name; the function is a lambda, a method,
            a generator or within another function; or the timeout is not positive.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _add(RegisteredTask(_checked_name(function, name), function, schema, timeout))
        return function

    if timeout is not None and not timeout > 0:
        raise ConfigError(f"@shoal.task: timeout {timeout}: expected seconds above 0")
    return register if function is None else register(function)


def task_name(function: object) -> str | None:
    """Return the name under which a function is a task, or None if it is none."""
    name: object = getattr(function, _MARK, None)
    return name if isinstance(name, str) else None


def unregistered_message(name: str) -> str:
    """Return the error for a name that no function here has, as a traceback ends.

    It is worded as MessagePack peers that are not ours expect it.
    """
    known = sorted(TASKS)
    return unknown_task_message(name, known)


def unknown_task_message(name: str, known: list[str]) -> str:
    """Return the error for a name that is not among these."""
    return (
        f"{__name__}.TaskNotRegisteredError: Task {name!r:.{NAME_MAX}} not registered "
        f"on this worker. Known tasks: {known}"
    )


def _checked_name(function: Callable[..., Any], name: str) -> str:
    if not isinstance(function, FunctionType):
        raise ConfigError(
            f"@shoal.task on {function!r:.80}: expected a function, written with def"
        )
    place = function.__qualname__
    if "<lambda>" in place:
        raise ConfigError("@shoal.task on a lambda: write it as a function, with def")
    if "<locals>" in place:
        raise ConfigError(
            f"@shoal.task on {place}: it stands in another function, where workers "
            "that import the module do not find it; move it to the module's top"
        )
    if _takes_an_object(function):
        raise ConfigError(
            f"@shoal.task on {place}: it is a method, and workers have no object to "
            "call it on; make it a function at the module's top"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"@shoal.task on {place}: it yields; a task returns its value in one piece"
        )
    name = name or f"{module_of(function)}.{place}"
    if len(name) > NAME_MAX or not name.isprintable():
        raise ConfigError(
            f"@shoal.task on {place}: its name must have at most {NAME_MAX} printable "
            "characters"
        )
    return name


def module_of(function: Callable[..., Any]) -> str:
    """Return by which name others import a function's module.

    What runs as a program is called ``__main__``, and by its file's name elsewhere.
    """
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file: str | None = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


def _add(new: RegisteredTask) -> None:
    old = TASKS.get(new.name)
    if old is not None and _place(old) != _place(new):
        raise ConfigError(
            f"@shoal.task: {_place(new)} and {_place(old)} both have the name "
            f"{new.name!r}; give one another: @shoal.task(name=...)"
        )
    if old is not None and _is_second(old, new):
        raise ConfigError(
            f"@shoal.task: {_place(new)} stands twice in its module, in lines "
            f"{_line(old)} and {_line(new)}; give one another name"
        )
    TASKS[new.name] = new
    setattr(new.function, _MARK, new.name)


def _takes_an_object(function: FunctionType) -> bool:
    """Say whether a function in a class is a method: it need not be a static one."""
    first = next(iter(inspect.signature(function).parameters), "")
    return "." in function.__qualname__ and first in ("self", "cls")


def _is_second(old: RegisteredTask, new: RegisteredTask) -> bool:
    """Say whether both stand in one file, and that is run for the first time.

    One that is run again, or a cell of a notebook, replaces what it had.
    """
    codes = [inspect.unwrap(each.function).__code__ for each in (old, new)]
    if codes[0].co_filename != codes[1].co_filename or _line(old) == _line(new):
        return False
    module = sys.modules.get(new.function.__module__)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return hasattr(module, "__file__")  # a program, which is run once
    # Python's own mark of an import that is not over; a reload does not set it.
    return bool(getattr(spec, "_initializing", False))


def _line(task: RegisteredTask) -> int:
    code: CodeType = inspect.unwrap(task.function).__code__
    return code.co_firstlineno


def _place(task: RegisteredTask) -> str:
    """Return where a function stands: a module that is loaded again is the same."""
    return f"{task.function.__module__}.{task.function.__qualname__}"
