"""Makes the arguments that a function wants of those that were sent.

Dataclasses, Structs and Pydantic's models travel as maps of their fields, tuples and
sets as lists: what they were is known from the function's type hints.
"""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, TypeAlias, Union
from uuid import UUID

import msgspec

from shoal.tasks.registry import RegisteredTask

Bound: TypeAlias = tuple[list[Any], dict[str, Any]]
Bind: TypeAlias = Callable[[list[Any], dict[str, Any]], Bound]
"""Makes the arguments of a call, of those that were sent, which it may change."""

_REBUILT = (tuple, set, frozenset, datetime, date, time, timedelta, UUID, Decimal)
_PLAIN = (
    *(None, type(None), bool, int, float, str, bytes, Any),
    *(list, dict, Sequence, Mapping),
)
_BYTES = (bytes, bytearray, memoryview)
_AS_THEY_ARE = (*_BYTES, *_REBUILT[3:])

_ALIASES: tuple[Any, ...] = ()
"""What a ``type`` statement makes (PEP 695), from Python 3.12 on."""
if sys.version_info >= (3, 12):  # where NDArray is one, from NumPy 2.5 on
    _ALIASES = (typing.TypeAliasType,)


def binder(task: RegisteredTask) -> Bind | None:
    """Return what makes a function's arguments; None if it takes them as they come.

    That raises ValueError naming the argument that does not fit, or whatever error of
    its own a Pydantic model has for that; TypeError if a schema is given something else
    than one map.
    """
    if task.schema is not None:
        return _by_schema(task.name, _rebuild(task.schema))
    return binder_by_hints(task.function)


def binder_by_hints(function: Callable[..., Any]) -> Bind | None:
    """Return what makes a function's arguments of what its type hints say."""
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except (NameError, TypeError, ValueError, AttributeError):
        return None  # hints that cannot be looked up here say nothing
    how = {
        name: _rebuild(hint)
        for name, hint in hints.items()
        if name in parameters and _says_more(hint)
    }
    if not how:
        return None
    places = [
        how.get(each.name)
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    names = [*parameters]
    rest = next((p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), "")
    others = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
    named = frozenset(names) - {rest, others}

    def bind(args: list[Any], kwargs: dict[str, Any]) -> Bound:
        for number, arg in enumerate(args):
            beyond = number >= len(places)
            rebuild = how.get(rest) if beyond else places[number]
            if rebuild is not None:
                name = f"{rest}[{number}]" if beyond else names[number]
                args[number] = _rebuilt(rebuild, arg, name)
        for name, arg in kwargs.items():
            rebuild = how.get(name if name in named else others)
            if rebuild is not None:
                kwargs[name] = _rebuilt(rebuild, arg, name)
        return args, kwargs

    return bind


def result_converter(function: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """Return what makes a function's result of what came back; None: it is as it is.

    That raises ValueError if what came does not fit the hint.
    """
    try:
        hint = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):
        return None
    if hint is None or not _says_more(hint):
        return None
    rebuild = _rebuild(hint)
    return lambda value: _rebuilt(rebuild, value, "the result")


def _by_schema(name: str, rebuild: Callable[[Any], Any]) -> Bind:
    def bind(args: list[Any], kwargs: dict[str, Any]) -> Bound:
        match args:
            case [dict() as fields] if not kwargs:
                return [_rebuilt(rebuild, fields, "the argument")], {}
            case []:
                return [_rebuilt(rebuild, kwargs, "the argument")], {}
            case _:
                raise TypeError(
                    f"{name} takes one map, or its fields as named arguments; it was "
                    f"given {len(args)} positional and {len(kwargs)} named ones"
                )

    return bind


def _rebuilt(rebuild: Callable[[Any], Any], value: Any, name: str) -> Any:
    try:
        return rebuild(value)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None


def _rebuild(hint: Any) -> Callable[[Any], Any]:
    """Return what makes a value of such a type."""
    if _is_model(hint):
        return lambda value: value if isinstance(value, hint) else _model(hint, value)
    return lambda value: _convert(hint, value)


def _convert(hint: Any, value: Any) -> Any:
    try:
        return msgspec.convert(
            value, hint, builtin_types=_AS_THEY_ARE, dec_hook=_foreign
        )
    except msgspec.ValidationError as error:
        # Models write dates and the like as texts.
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, hint, builtin_types=_BYTES, dec_hook=_foreign)
        raise error from None


def _says_more(hint: Any) -> bool:
    """Say whether a hint names a type that values do not have when they come.

    Only if all of it is known: what a function's author wrote for people, or for
    another checker, is not enforced.
    """
    try:
        leaves = list(_leaves(hint))
    except (NameError, TypeError):
        return False  # an alias for what is not there, or of nothing with parameters
    rebuilt = [*map(_is_rebuilt, leaves)]
    known = (
        there or leaf in _PLAIN for there, leaf in zip(rebuilt, leaves, strict=True)
    )
    if not any(rebuilt) or not all(known):
        return False
    try:
        msgspec.convert(None, hint, dec_hook=_foreign)
    except TypeError:
        return False  # a union of which msgspec cannot tell one from another
    except msgspec.ValidationError:
        pass
    return True


def _leaves(hint: Any, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield the classes that a hint is made of.

    ``within`` are the aliases around it; one that is part of itself is left as it is.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    alias = hint if origin is None else origin
    if isinstance(alias, _ALIASES) and alias not in within:
        stands_for = alias.__value__ if origin is None else alias.__value__[inner]
        yield from _leaves(stands_for, (*within, alias))
        return
    if origin is None:
        yield hint
        return
    if origin is Annotated:
        inner = inner[:1]
    elif origin is not Union and origin is not types.UnionType:
        yield origin
    if origin is tuple and inner[-1:] == (...,):
        inner = inner[:-1]
    if not _is_array(origin):
        for each in inner:
            yield from _leaves(each, within)


def _is_rebuilt(hint: Any) -> bool:
    if not isinstance(hint, type):
        return False
    return (
        hint in _REBUILT
        or is_dataclass(hint)
        or issubclass(hint, msgspec.Struct | Enum)
        or _is_model(hint)
        or _is_array(hint)
    )


def _foreign(hint: Any, value: Any) -> Any:
    """Make a value of a type that msgspec does not know."""
    kind = typing.get_origin(hint) or hint
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    if _is_model(kind):
        return _model(kind, value)
    if _is_array(kind):
        import numpy as np

        return np.asarray(value)
    raise msgspec.ValidationError(
        f"expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}"
    )


def _is_model(hint: Any) -> bool:
    """Say whether a type is a Pydantic model, without importing Pydantic."""
    pydantic = sys.modules.get("pydantic")
    return (
        pydantic is not None
        and isinstance(hint, type)
        and issubclass(hint, pydantic.BaseModel)
    )


def _model(model: Any, value: Any) -> Any:
    return model.model_validate(value)


def _is_array(hint: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None and isinstance(hint, type) and issubclass(hint, numpy.ndarray)
    )
