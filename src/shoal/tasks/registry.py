"""The registry of tasks (``@shoal.task``), and imports of the modules with them."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, overload

from shoal.domain.errors import ConfigError
from shoal.tasks.errors import format_task_error

P = ParamSpec("P")
R = TypeVar("R")

NAME_MAX = 256  # characters
PYTHON = "{}.{}".format(*sys.version_info)
"""The version of Python, as clients and workers state it: its bytecode is its own."""

EXPECTED = "expected a module, such as sums, or its file, such as path/to/sums.py"
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


def import_tasks(modules: list[str]) -> None:
    """Import modules, such as ``sums`` or ``path/to/sums.py``, to register their tasks.

    Resolves names as Python does, from the working directory.

    Raises ConfigError if a module does not exist, has the name of another one, has no
    tasks, or fails on import: then with the traceback.
    """
    for each in modules:
        before = len(TASKS)
        module = _import_one(each)
        if len(TASKS) == before and not _has_tasks(module):
            raise ConfigError(
                f"--tasks {each}: no task found; decorate functions with @shoal.task, "
                "or omit the module"
            )


def _import_one(module: str) -> ModuleType:
    is_file = module.endswith(".py")
    try:
        if is_file:
            return _import_file(task_file(module))
        _check_module_name(module)
        return importlib.import_module(module)
    except ConfigError:
        raise
    except BaseException as error:
        # Foreign code may raise anything, SystemExit too.
        if not is_file and _is_missing(error, module):
            raise ConfigError(_missing_module_message(module)) from error
        raise ConfigError(
            f"--tasks {module} could not be imported:\n{format_task_error(error)}"
        ) from error


def _check_module_name(name: str) -> None:
    """Raise ConfigError for an invalid module name."""
    if all(each.isidentifier() for each in name.split(".")):
        return
    module, colon, _ = name.partition(":")
    if colon and module:
        raise ConfigError(
            f"--tasks {name}: a worker offers all tasks of a module: --tasks {module}"
        )
    if Path(name).expanduser().is_dir():
        raise ConfigError(f"--tasks {name}: is a folder; {EXPECTED}")
    raise ConfigError(f"--tasks {name}: {EXPECTED}")


def _is_missing(error: BaseException, name: str) -> bool:
    """Return whether the module itself or its package is missing."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return name == error.name or name.startswith(f"{error.name}.")


def _missing_module_message(name: str) -> str:
    folder = Path.cwd()
    file = f"{name.replace('.', '/')}.py"
    return (
        f"--tasks {name}: no such module: neither {folder / file} nor an installed "
        "one; run this in its folder, or give its file: --tasks path/to/"
        f"{Path(file).name}"
    )


def _has_tasks(module: ModuleType) -> bool:
    """Return whether a module that was imported before has registered tasks.

    Tasks that it imports from other modules count.
    """
    name = module.__name__
    return any(
        task.function.__module__ == name
        or task.function.__module__.startswith(f"{name}.")
        for task in TASKS.values()
    ) or any(
        isinstance(each, FunctionType) and task_name(each) in TASKS
        for each in vars(module).values()
    )


def task_file(name: str) -> Path:
    """Return a file with tasks.  Raises ConfigError if it is missing."""
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"--tasks {file}: no such file")
    return file


def _import_file(file: Path) -> ModuleType:
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
        raise ConfigError(
            f"--tasks {file}: another module is named {name!r}; rename the file"
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # for the modules that it imports
    sys.modules[name] = module
    # As the import system does; ``registry`` reads it.
    spec._initializing = True  # type: ignore[attr-defined]  # Python has no name for it
    try:
        spec.loader.exec_module(module)
    finally:
        spec._initializing = False  # type: ignore[attr-defined]  # as above
    return module
