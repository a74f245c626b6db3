"""Converts arguments in JSON to the types of a function's hints.

Callers without Python's types, and programs of others, send dataclasses, Structs and
Pydantic models as maps of their fields, tuples and sets as lists.
"""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, TypeAlias, Union
from uuid import UUID

import msgspec

from shoal.tasks.registry import RegisteredTask

Bound: TypeAlias = tuple[list[Any], dict[str, Any]]
Bind: TypeAlias = Callable[[list[Any], dict[str, Any]], Bound]
"""Converts received arguments for a call; may change them in place."""

_REBUILT = (tuple, set, frozenset, datetime, date, time, timedelta, UUID, Decimal)
_PLAIN = (
    *(None, type(None), bool, int, float, str, bytes, Any),
    *(list, dict, Sequence, Mapping, Iterable),
)
_BYTES = (bytes, bytearray, memoryview)
_NATIVE = (*_BYTES, *_REBUILT[3:])

_ALIASES: tuple[Any, ...] = ()
"""The type of ``type`` aliases (PEP 695), from Python 3.12 on."""
if sys.version_info >= (3, 12):  # NDArray is such an alias from NumPy 2.5 on
    _ALIASES = (typing.TypeAliasType,)


def binder(task: RegisteredTask, *, exact: bool) -> Bind | None:
    """Return a converter of a function's arguments; None if it needs no conversion.

    Those of ``exact`` callers fit already, unless they are the fields of a schema.

    The converter raises ValueError, or a Pydantic model's own error, naming the
    argument that does not fit, and TypeError if a schema gets anything but one map.
    """
    if task.schema is not None:
        return _by_schema(task.name, task.schema)
    return None if exact else binder_by_hints(task.function)


def binder_by_hints(function: Callable[..., Any]) -> Bind | None:
    """Return a converter of arguments to a function's type hints."""
    hints = _hints_of(function)
    converters = {
        name: _rebuild(hint)
        for name, hint in hints.items()
        if name != "return" and _needs_conversion(hint)
    }
    if not converters:
        return None
    # A decorator may pass other arguments on than it gets, but under their names.
    parameters = inspect.signature(function, follow_wrapped=False).parameters
    positional = [
        converters.get(each.name)
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    names = [*parameters]
    var_positional = next(
        (p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL), ""
    )
    var_keyword = next(
        (p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), ""
    )
    named = {*hints, *names} - {var_positional, var_keyword}
    decorates = inspect.unwrap(function) is not function

    def bind(args: list[Any], kwargs: dict[str, Any]) -> Bound:
        for number, arg in enumerate(args):
            if number < len(positional):
                name, rebuild = names[number], positional[number]
            elif decorates:
                name = _passed_on(function, number, len(args), kwargs, converters)
                rebuild = converters.get(name)
            else:
                name = f"{var_positional}[{number}]"
                rebuild = converters.get(var_positional)
            if rebuild is not None:
                args[number] = _rebuilt(rebuild, arg, name)
        for name, arg in kwargs.items():
            rebuild = converters.get(name if name in named else var_keyword)
            if rebuild is not None:
                kwargs[name] = _rebuilt(rebuild, arg, name)
        return args, kwargs

    return bind


def _passed_on(
    function: Callable[..., Any],
    number: int,
    count: int,
    kwargs: Mapping[str, Any],
    converters: Mapping[str, Any],
) -> str:
    """Return the parameter that gets one of ``count`` arguments of a decorator.

    A decorator may add arguments of its own, so that is known only if all are given.
    Raises TypeError if it is not known, and may be one with a converter.
    """
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    names = [
        each.name
        for each in parameters
        if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)
    ]
    variadic = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if count <= len(names) and not variadic and kwargs.keys() >= {*names[count:]}:
        return names[number]
    possible = [
        each for each in names[number:] if each in converters and each not in kwargs
    ]
    if possible:
        raise TypeError(
            f"args[{number}]: it may be for {' or '.join(possible)}, since a decorator "
            "of the function may add arguments: give it by name"
        )
    return ""


def result_converter(function: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """Return a converter of a function's result; None if it needs no conversion.

    The converter raises ValueError if the value does not fit the hint.
    """
    hint = _hints_of(function).get("return")
    if hint is None or not _needs_conversion(hint):
        return None
    rebuild = _rebuild(hint)
    return lambda value: _rebuilt(rebuild, value, "the result")


def unused_hints(function: Callable[..., Any]) -> list[str]:
    """Return the parameters whose hints name classes, but cannot be used."""
    hints = _hints_of(function)
    named = getattr(inspect.unwrap(function), "__annotations__", {})
    return [
        name
        for name in named
        if name != "return" and (name not in hints or _is_half_known(hints[name]))
    ]


def _is_half_known(hint: Any) -> bool:
    with suppress(NameError, TypeError):
        return any(map(_is_rebuilt, _leaves(hint))) and not _needs_conversion(hint)
    return True


def _hints_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the type hints that can be resolved here.

    A name that is imported under ``TYPE_CHECKING`` is one that cannot.
    """
    function = inspect.unwrap(function)
    hints: dict[str, Any] = {}
    for name, hint in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        with suppress(NameError, TypeError, ValueError, AttributeError, SyntaxError):
            hints |= typing.get_type_hints(
                alone, getattr(function, "__globals__", None)
            )
    return hints


def _by_schema(name: str, schema: type) -> Bind:
    rebuild = _rebuild(schema)

    def bind(args: list[Any], kwargs: dict[str, Any]) -> Bound:
        match args:
            case [given] if not kwargs and isinstance(given, schema):
                return args, kwargs
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
    """Return a converter to a type."""
    if typing.get_origin(hint) is Iterable:
        hint = list[typing.get_args(hint)]  # type: ignore[misc]
    if _is_model(hint):
        return lambda value: value if isinstance(value, hint) else _model(hint, value)
    hint = _with_stand_ins(hint)
    return lambda value: _convert(hint, value)


def _convert(hint: Any, value: Any) -> Any:
    try:
        return msgspec.convert(
            value, hint, builtin_types=_NATIVE, dec_hook=_convert_foreign
        )
    except msgspec.ValidationError as error:
        # Pydantic models encode dates and similar types as text.
        with suppress(msgspec.ValidationError):
            return msgspec.convert(
                value, hint, builtin_types=_BYTES, dec_hook=_convert_foreign
            )
        raise error from None


def _needs_conversion(hint: Any) -> bool:
    """Return whether values must be converted to fit a hint.

    Only if every part of the hint is known: hints written for readers, or for another
    checker, are not enforced.
    """
    try:
        leaves = list(_leaves(hint))
    except (NameError, TypeError):
        return False  # an unresolvable alias, or one with invalid parameters
    conversions = [*map(_is_rebuilt, leaves)]
    known = (
        converted or leaf in _PLAIN
        for converted, leaf in zip(conversions, leaves, strict=True)
    )
    if not any(conversions) or not all(known):
        return False
    try:
        return _is_known(_with_stand_ins(hint))
    except TypeError:
        return False  # a generic that takes no such parameters


def _is_known(hint: Any) -> bool:
    """Return whether msgspec converts to a type; not to some unions."""
    try:
        msgspec.convert(None, hint, dec_hook=_convert_foreign)
    except TypeError:
        return False
    except msgspec.ValidationError:
        pass
    return True


class _StandIn(type):
    """A type for msgspec in place of a class that it does not know."""

    target: type

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.target)


def _with_stand_ins(hint: Any) -> Any:
    """Replace enums of other than texts or integers, and dataclasses with InitVar."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        own = isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, Enum))
        if not own or _is_known(hint):
            return hint
        return _StandIn(hint.__name__, (), {"target": hint})
    if origin is Literal or origin is Annotated or isinstance(origin, _ALIASES):
        return hint
    replaced = tuple(map(_with_stand_ins, inner))
    if replaced == inner:
        return hint
    if origin is types.UnionType:
        return reduce(or_, replaced)
    return origin[replaced]


def _member(kind: type[Enum], value: Any) -> Enum:
    """Return the member of a value, or of a name."""
    for member in kind:
        plain = msgspec.json.decode(msgspec.json.encode(member.value, enc_hook=repr))
        if value == plain and isinstance(value, bool) == isinstance(plain, bool):
            return member
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    expected = ", ".join(map(repr, kind.__members__))
    raise msgspec.ValidationError(f"expected a value of {kind.__name__}: {expected}")


def _instance(kind: type, fields: Any) -> Any:
    """Create a dataclass by its constructor, with converted arguments."""
    if not isinstance(fields, dict):
        what = type(fields).__name__
        raise msgspec.ValidationError(f"expected {kind.__name__}, got {what}")
    hints: Mapping[str, Any] = {}
    with suppress(NameError, TypeError):  # names under TYPE_CHECKING
        hints = typing.get_type_hints(kind)
    arguments = {}
    for name, value in fields.items():
        hint = hints.get(name)
        hint = hint.type if isinstance(hint, InitVar) else hint
        converts = hint is not None and _is_known(_with_stand_ins(hint))
        arguments[name] = _rebuilt(_rebuild(hint), value, name) if converts else value
    try:
        return kind(**arguments)
    except TypeError as error:
        raise msgspec.ValidationError(str(error)) from error


def _leaves(hint: Any, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield the classes in a hint.

    ``within`` are the aliases around it; a recursive alias is yielded unexpanded.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    alias = hint if origin is None else origin
    if isinstance(alias, _ALIASES) and alias not in within:
        target = alias.__value__ if origin is None else alias.__value__[inner]
        yield from _leaves(target, (*within, alias))
        return
    if origin is None:
        yield hint
        return
    if origin is Literal:
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
        or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
        or _is_model(hint)
        or _is_array(hint)
    )


def _convert_foreign(hint: Any, value: Any) -> Any:
    """Convert a value to a type that msgspec does not know."""
    if isinstance(hint, _StandIn):
        target: Any = hint.target
        if isinstance(value, target):
            return value
        make = _member if issubclass(target, Enum) else _instance
        return make(target, value)
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
    """Return whether a type is a Pydantic model, without importing Pydantic."""
    pydantic = sys.modules.get("pydantic")
    return (
        pydantic is not None
        and isinstance(hint, type)
        and issubclass(hint, pydantic.BaseModel)
    )


def _model(model: Any, value: Any) -> Any:
    """Create a model of its fields: by alias or name, as other programs send them.

    Computed fields are part of what functions return, and of no constructor.
    """
    if isinstance(value, dict):
        computed = model.model_computed_fields.keys()
        value = {name: each for name, each in value.items() if name not in computed}
    by_name = "by_name" in inspect.signature(model.model_validate).parameters
    return model.model_validate(value, **({"by_name": True} if by_name else {}))


def _is_array(hint: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None and isinstance(hint, type) and issubclass(hint, numpy.ndarray)
    )
