"""Instances of classes as data: the name of their class, and their state.

Dataclasses, attrs classes, Structs, Pydantic models, named tuples and enums are rebuilt
as what they were, without their constructors: those would convert or validate once more
what they have made.  A class is looked up among the modules that are imported already,
so that no peer can cause an import; it has to be of one of these kinds, and no other
code of it runs.

Workers that trust code get pickles, and return them.
"""

import inspect
import io
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum, Flag
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import msgspec

from shoal.domain.errors import InvalidRequest
from shoal.tasks.registry import main_module_name

MAIN = "__main__"
CLASSES_MAX = 1024  # whose kinds are cached: programs may send ever new ones

State: TypeAlias = Any
"""What a kind of class keeps of an instance: a value that may contain others."""


class ClassKind(NamedTuple):
    """How instances of a kind of class are taken apart and rebuilt.

    ``rebuild`` raises InvalidRequest, TypeError or ValueError if the state is not that
    of an instance.
    """

    matches: Callable[[type], bool]
    state: Callable[[Any], State]
    rebuild: Callable[[Any, State], object]


def reduce_instance(value: Any) -> list[Any] | None:
    """Return the module and name of a value's class, and its state; None: unsupported.

    Unsupported is also a class that its module does not have under its name, such as
    one within a function.
    """
    kind: Any = type(value)
    found = _kind_of(kind)
    if found is None or (where := _address(kind)) is None:
        return None
    return [*where, found.state(value)]


def rebuild_instance(parts: Any) -> object:
    """Return the instance with a class and a state.

    Raises InvalidRequest if the class is not imported here, and what
    ``ClassKind.rebuild`` does.
    """
    module, name, state = parts
    kind = find_class(str(module), str(name))
    found = None if kind is None else _kind_of(kind)
    if kind is None or found is None:
        raise InvalidRequest(
            f"a value is of the class {module}.{name}, which is not imported here: "
            "import it in the module of the function; a module in a package is given "
            "by its name, as in `shoal join … --tasks package.module`"
        )
    return found.rebuild(kind, state)


def instance_contents(value: Any) -> Any:
    """Return what peers that have no classes get of an instance.

    That is the fields by name, the value of an enum; None: it is no instance.
    """
    if isinstance(value, Enum):
        return value.value
    kind: Any = type(value)
    if is_dataclass(kind) or _is_attrs(kind):
        names = getattr(kind, "__dataclass_fields__", None) or [
            each.name for each in kind.__attrs_attrs__
        ]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if _is_model(kind):
        try:
            return value.model_dump(mode="json")
        except ValueError:  # a field that JSON cannot represent, such as an array
            return value.model_dump()
    return None


@lru_cache(CLASSES_MAX)
def _kind_of(kind: type) -> ClassKind | None:
    return next((each for each in _KINDS if each.matches(kind)), None)


def _address(kind: type) -> tuple[str, str] | None:
    """Return the names under which others find a class; None: they cannot."""
    module, name = kind.__module__, kind.__qualname__
    if find_class(module, name) is kind:
        return (main_module_name() if module == MAIN else module), name
    # The class of another program that came with its code.
    return (module, name) if module == MAIN and "<" not in name else None


def find_class(module: str, name: str) -> type | None:
    """Return a class of a module that is imported already; None: there is none.

    The program's own module is known to others by the name of its file.
    """
    if module not in sys.modules and module == main_module_name():
        module = MAIN
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr, which may run code of the module or of a class around it.
        if not isinstance(found, type) and not inspect.ismodule(found):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) else None


def _attributes(value: Any) -> State:
    """Return the attributes of an instance, whether they are slots or not."""
    return {**getattr(value, "__dict__", {}), **slot_values(value)}


def slot_values(value: object) -> dict[str, Any]:
    """Return the attributes of an instance that are slots."""
    kind: Any = type(value)
    state = {}
    for name in slots_of(kind):
        with suppress(AttributeError):  # not hasattr, which may run its __getattr__
            state[name] = object.__getattribute__(value, name)
    return state


def _with_attributes(kind: Any, state: State) -> object:
    instance: object = object.__new__(kind)
    slots = slots_of(kind)
    for name, value in state.items():
        if name in slots:
            object.__setattr__(instance, name, value)  # past ``frozen``
        else:
            vars(instance)[name] = value  # past properties
    return instance


@lru_cache(CLASSES_MAX)
def slots_of(kind: type) -> frozenset[str]:
    """Return the names of the slots of a class, as its instances have them."""
    return frozenset(
        name
        for each in kind.__mro__
        for name, member in vars(each).items()
        if inspect.ismemberdescriptor(member) and each.__module__ != "builtins"
    )


def _is_attributes(kind: type) -> bool:
    """Return whether an instance is its attributes, and nothing that C code keeps."""
    own = [each for each in kind.__mro__ if each.__module__ != "builtins"]
    return (is_dataclass(kind) or _is_attrs(kind)) and (
        len(own) == len(kind.__mro__) - 1  # all but ``object``
    )


def _is_attrs(kind: type) -> bool:
    return hasattr(kind, "__attrs_attrs__")


def rebuild_struct(kind: Any, state: State) -> object:
    """Return a Struct with its fields, as they were."""
    instance = kind(**state)
    if hasattr(kind, "__post_init__"):  # it ran for this state before
        for name, value in state.items():
            msgspec.structs.force_setattr(instance, name, value)
    return instance


def _rebuild_enum(kind: Any, state: State) -> object:
    return kind(state) if issubclass(kind, Flag) else kind.__members__[state]


def _tuple_state(value: Any) -> State:
    if getattr(value, "__dict__", None):
        raise InvalidRequest("a named tuple has attributes besides its items")
    return [*value]


def _is_model(kind: type) -> bool:
    """Return whether a class is a Pydantic model, without importing Pydantic."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _is_secret(kind: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(
        kind, pydantic.SecretStr | pydantic.SecretBytes
    )


def _model_state(value: Any) -> State:
    import pydantic

    return pydantic.BaseModel.__getstate__(value)


def _rebuild_model(kind: Any, state: State) -> object:
    import pydantic

    instance: Any = object.__new__(kind)
    pydantic.BaseModel.__setstate__(instance, state)
    return instance


_KINDS = (
    ClassKind(
        lambda kind: issubclass(kind, Enum),
        lambda value: value.value if isinstance(value, Flag) else value.name,
        _rebuild_enum,
    ),
    ClassKind(
        lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"),
        _tuple_state,
        lambda kind, state: tuple.__new__(kind, state),
    ),
    ClassKind(
        lambda kind: issubclass(kind, msgspec.Struct),
        msgspec.structs.asdict,
        rebuild_struct,
    ),
    ClassKind(_is_model, _model_state, _rebuild_model),
    ClassKind(
        _is_secret,
        lambda value: value.get_secret_value(),
        lambda kind, state: kind(state),
    ),
    ClassKind(_is_attributes, _attributes, _with_attributes),
)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    def reducer_override(self, value: object) -> object:
        # Its own reduction would run __post_init__ once more.
        if isinstance(value, msgspec.Struct):
            return rebuild_struct, (type(value), msgspec.structs.asdict(value))
        return super().reducer_override(value)


def dump_pickle(value: object, stays: Callable[[Any], bool] | None = None) -> bytes:
    """Pickle a value, and those of its ``PickleBuffer`` of which ``stays`` is true.

    Raises whatever its parts raise.
    """
    file = io.BytesIO()
    _Pickler(file, buffer_callback=stays).dump(value)
    return file.getvalue()
