"""Finding the exception class of a program's own that a worker's traceback names.

Only the module of the function that was called is looked into, which the program has
imported already, and the modules that are named in it: a worker has nothing imported,
and no code of the class runs.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

MAIN = "__main__"
NOWHERE = ModuleType("nowhere")


def home_of(name: str, function: object = None) -> str:
    """Return the module of a function that is called by a name; empty: not known here.

    Without the function it is the module that the name begins with, if that has one.
    """
    known: object = getattr(function, "__module__", None)
    if isinstance(known, str):
        return known
    module, _, last = name.rpartition(".")
    home = MAIN if module == _main_stem() else module
    return home if last in vars(sys.modules.get(home, NOWHERE)) else ""


def source_of(home: str) -> str:
    """Return what ``--tasks`` takes for a module; empty: it has no file."""
    if home != MAIN:
        return home
    file = getattr(sys.modules.get(MAIN), "__file__", None)
    return Path(file).name if file else ""


def own_error(home: str, name: str, text: str) -> Exception | None:
    """Return an exception of the class that a traceback names, or None.

    It is made without its ``__init__``: it has its text, and no fields of its own.
    """
    found = _class(home, name)
    if found is None:
        return None
    builtin = next(each for each in found.__mro__ if each.__module__ == "builtins")
    made: Exception = builtin.__new__(found)  # type: ignore[call-overload]  # no type's
    made.args = (text,) if text else ()
    return made


def _class(home: str, name: str) -> type[Exception] | None:
    module = sys.modules.get(home)
    if module is None:
        return None
    where, _, last = name.rpartition(".")
    for each in [*vars(module).values()]:
        if isinstance(each, ModuleType) and each.__name__ == where:
            each = _namespace(each).get(last)
        if (
            isinstance(each, type)
            and issubclass(each, Exception)
            and not issubclass(
                each, StopIteration | StopAsyncIteration | ExceptionGroup
            )
            and name in _names(each)
        ):
            return each
    return None


def _namespace(module: ModuleType) -> Mapping[str, object]:
    return vars(module)  # not getattr, which may run code of the module


def _names(kind: type) -> tuple[str, ...]:
    """Return what tracebacks call a class, here and where its module is imported."""
    if kind.__module__ == MAIN:
        return kind.__qualname__, f"{_main_stem()}.{kind.__qualname__}"
    return (f"{kind.__module__}.{kind.__qualname__}",)


def _main_stem() -> str:
    main = sys.modules.get(MAIN)
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else MAIN
