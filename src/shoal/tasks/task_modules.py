"""Imports the modules with a worker's tasks, by name or by file."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import FunctionType, ModuleType

from shoal.domain.errors import ConfigError
from shoal.tasks.errors import format_task_error
from shoal.tasks.registry import TASKS, task_name

EXPECTED = "expected a module, such as sums, or its file, such as path/to/sums.py"


def import_tasks(modules: list[str]) -> None:
    """Import modules, such as ``sums`` or ``path/to/sums.py``, so that they register.

    Names are looked for as Python does it, from the folder that this runs in.

    Raises ConfigError if there is no such module, another one has its name, it has no
    tasks, or it cannot be imported: then with the traceback of what it does.
    """
    for each in modules:
        before = len(TASKS)
        module = _import_one(each)
        if len(TASKS) == before and not _has_tasks(module):
            raise ConfigError(
                f"--tasks {each}: no function there is a task; write @shoal.task above "
                "those that are to be, or leave it out"
            )


def _import_one(module: str) -> ModuleType:
    is_file = module.endswith(".py")
    try:
        if is_file:
            return _import_file(Path(module).expanduser().resolve())
        _check_module_name(module)
        return importlib.import_module(module)
    except ConfigError:
        raise
    except BaseException as error:
        # It is somebody else's code, and may raise or end whatever it likes.
        if not is_file and _is_missing(error, module):
            raise ConfigError(_not_there(module)) from error
        raise ConfigError(
            f"--tasks {module} could not be imported:\n{format_task_error(error)}"
        ) from error


def _check_module_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a module."""
    if all(each.isidentifier() for each in name.split(".")):
        return
    module, colon, _ = name.partition(":")
    if colon and module:
        raise ConfigError(
            f"--tasks {name}: a worker offers all tasks of a module: --tasks {module}"
        )
    if Path(name).expanduser().is_dir():
        raise ConfigError(f"--tasks {name}: this is a folder; {EXPECTED}")
    raise ConfigError(f"--tasks {name}: {EXPECTED}")


def _is_missing(error: BaseException, name: str) -> bool:
    """Say whether it is the module itself, or what it is in, that is not there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return False
    return name == error.name or name.startswith(f"{error.name}.")


def _not_there(name: str) -> str:
    folder = Path.cwd()
    file = f"{name.replace('.', '/')}.py"
    return (
        f"--tasks {name}: there is no such module: neither {folder / file} nor an "
        "installed one; run this where it is, or give its file: --tasks path/to/"
        f"{Path(file).name}"
    )


def _has_tasks(module: ModuleType) -> bool:
    """Say whether tasks of a module are there that was imported before, or by others.

    It may also have got them from elsewhere, to offer them.
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


def _import_file(file: Path) -> ModuleType:
    name = file.stem
    if not file.is_file():
        raise ConfigError(f"--tasks {file}: there is no such file")
    there = sys.modules.get(name)
    if there is not None:
        if getattr(there, "__file__", None) == str(file):
            return there
        raise ConfigError(
            f"--tasks {file}: there is another module of the name {name!r} already; "
            "call the file something else"
        )
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # where it has the modules that it imports
    sys.modules[name] = module
    # As for other modules while they are imported; see ``registry``.
    spec._initializing = True  # type: ignore[attr-defined]  # Python has no name for it
    try:
        spec.loader.exec_module(module)
    finally:
        spec._initializing = False  # type: ignore[attr-defined]  # as above
    return module
