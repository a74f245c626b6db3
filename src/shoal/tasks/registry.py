"""The registry of tasks (``@shoal.task``)."""

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
PYTHON = "{}.{}".format(*sys.version_info)
"""The version of Python, as clients and workers state it: its bytecode is its own."""

_MARK = "__shoal_task__"


@dataclass(frozen=True, slots=True)
class RegisteredTask:
    """A function that is a task.

    ``schema`` is the class of its only parameter.  ``timeout`` is the default limit of
    a call in seconds; None: that of the job.  ``openai``: see ``task``.
    """

    name: str
    function: Callable[..., Any]
    schema: type | None = None
    timeout: float | None = None
    openai: bool = False


TASKS: dict[str, RegisteredTask] = {}
"""The tasks of this process, by name."""


@overload
def task(function: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def task(
    *,
    name: str = "",
    schema: type | None = None,
    timeout: float | None = None,
    openai: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    schema: type | None = None,
    timeout: float | None = None,
    openai: bool = False,
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
        openai: set OPENAI_BASE_URL and OPENAI_API_KEY for each call, so that OpenAI's
            clients use the models of the pool, as the caller of the function.

    Returns:
        The function, or without one a decorator.

    Raises:
        ConfigError: another function has the name; the function is a lambda, a method,
            a generator or within another function; or the timeout is not positive.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        checked = _checked_name(function, name)
        _add(RegisteredTask(checked, function, schema, timeout, openai))
        return function

    if timeout is not None and not timeout > 0:
        raise ConfigError(f"@shoal.task: timeout {timeout}: expected seconds above 0")
    return register if function is None else register(function)


def task_name(function: object) -> str | None:
    """Return the name of a task; None if the function is not a task."""
    name: object = getattr(function, _MARK, None)
    return name if isinstance(name, str) else None


def unregistered_message(name: str) -> str:
    """Return the error for a name without a task in this process."""
    return unknown_task_message(name, sorted(TASKS))


def unknown_task_message(name: str, known: list[str]) -> str:
    """Return the error for an unknown name, in the form of a traceback's last line.

    Peers of other programs expect this wording.
    """
    return (
        f"{__name__}.TaskNotRegisteredError: Task {name!r:.{NAME_MAX}} not registered "
        f"on this worker. Known tasks: {known}"
    )


def _checked_name(function: Callable[..., Any], name: str) -> str:
    if not isinstance(function, FunctionType):
        raise ConfigError(
            f"@shoal.task on {function!r:.80}: expected a function defined with def"
        )
    qualname = function.__qualname__
    if "<lambda>" in qualname:
        raise ConfigError("@shoal.task on a lambda: define a function with def")
    if "<locals>" in qualname:
        raise ConfigError(
            f"@shoal.task on {qualname}: workers cannot import a nested function; move "
            "it to the top level of the module"
        )
    if _is_method(function):
        raise ConfigError(
            f"@shoal.task on {qualname}: workers have no object to call a method on; "
            "make it a function at the top level of the module"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"@shoal.task on {qualname}: a task cannot be a generator; return a value"
        )
    name = name or f"{module_of(function)}.{qualname}"
    if len(name) > NAME_MAX or not name.isprintable():
        raise ConfigError(
            f"@shoal.task on {qualname}: the name must have at most {NAME_MAX} "
            "printable characters"
        )
    return name


def module_of(function: Callable[..., Any]) -> str:
    """Return the name by which workers import a function's module.

    For a program's ``__main__`` that is ``main_module_name``.
    """
    if function.__module__ != "__main__":
        return function.__module__
    return main_module_name()


def main_module_name() -> str:
    """Return the importable name of a program's ``__main__``: that of its file."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file: str | None = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


def _add(new: RegisteredTask) -> None:
    old = TASKS.get(new.name)
    if old is not None and _location(old) != _location(new):
        raise ConfigError(
            f"@shoal.task: {_location(new)} and {_location(old)} both have the name "
            f"{new.name!r}; rename one with @shoal.task(name=...)"
        )
    if old is not None and _is_duplicate(old, new):
        raise ConfigError(
            f"@shoal.task: {_location(new)} is defined twice in its module, in lines "
            f"{_line(old)} and {_line(new)}; rename one"
        )
    TASKS[new.name] = new
    setattr(new.function, _MARK, new.name)


def _is_method(function: FunctionType) -> bool:
    """Return whether a function is a method, but not a static one."""
    first = next(iter(inspect.signature(function).parameters), "")
    return "." in function.__qualname__ and first in ("self", "cls")


def _is_duplicate(old: RegisteredTask, new: RegisteredTask) -> bool:
    """Return whether one module defines both while it is first executed.

    A reloaded module, or a cell of a notebook, replaces its earlier tasks.
    """
    codes = [inspect.unwrap(each.function).__code__ for each in (old, new)]
    if codes[0].co_filename != codes[1].co_filename or _line(old) == _line(new):
        return False
    module = sys.modules.get(new.function.__module__)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        return hasattr(module, "__file__")  # a program, which runs once
    # Set by Python during an import, but not during a reload.
    return bool(getattr(spec, "_initializing", False))


def _line(task: RegisteredTask) -> int:
    code: CodeType = inspect.unwrap(task.function).__code__
    return code.co_firstlineno


def _location(task: RegisteredTask) -> str:
    """Return the qualified name of a task's function, which a reload preserves."""
    return f"{task.function.__module__}.{task.function.__qualname__}"
