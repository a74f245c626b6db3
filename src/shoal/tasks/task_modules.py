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
            return _import_file(Path(module).expanduser().resolve())
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


def _import_file(file: Path) -> ModuleType:
    name = file.stem
    if not file.is_file():
        raise ConfigError(f"--tasks {file}: no such file")
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
