"""Imports the modules that have a worker's tasks, by name or by file."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shoal.domain.errors import ConfigError


def import_tasks(modules: list[str]) -> None:
    """Import modules, such as ``sums`` or ``path/to/sums.py``, so that they register.

    Names are looked for as Python does it, from the folder that this runs in.  What an
    import raises is not caught.

    Raises ConfigError if a file is not there, or another module has its name.
    """
    for each in modules:
        if each.endswith(".py"):
            _import_file(Path(each).expanduser().resolve())
        else:
            importlib.import_module(each)


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
    spec.loader.exec_module(module)
    return module
