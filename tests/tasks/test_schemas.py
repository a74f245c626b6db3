"""Conversion of arguments to type hints and schemas."""

import datetime as dt
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from shoal.tasks.registry import RegisteredTask
from shoal.tasks.schemas import binder, unused_hints

if TYPE_CHECKING:
    from fractions import Fraction


class Colour(Enum):
    RED = "red"


class Mixed(Enum):
    WORD = "b"
    HALF = 0.5
    PAIR = (1, 2)


@dataclass
class Scaled:
    x: int
    scale: InitVar[int] = 2
    kind: Mixed = Mixed.HALF

    def __post_init__(self, scale: int) -> None:
        self.x *= scale


@dataclass
class Around:
    inner: list[Scaled]


class Named(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(alias="sizeOf")

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def double(self) -> int:
        return 2 * self.size


class Config(BaseModel):
    epochs: int
    lr: float = 0.1


@dataclass
class Point:
    x: int
    config: Config | None = None


class Struct(msgspec.Struct):
    points: tuple[Point, ...]


class Unknown:
    pass


def bound(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bind = binder(RegisteredTask("f", function), exact=False)
    assert bind is not None
    return bind([*args], kwargs)


def test_arguments_are_converted_to_type_hints() -> None:
    def f(
        point: Point,
        *more: Struct,
        config: Config | None = None,
        array: npt.NDArray[np.float64] | None = None,
        number: int = 0,
        **others: Colour,
    ) -> None: ...

    args, kwargs = bound(
        f,
        {"x": 1, "config": {"epochs": 2}},
        {"points": [{"x": 3}]},
        config={"epochs": 4, "lr": 1},
        array=[1, 2],
        number="as it came",
        colour="red",
    )

    assert args == [Point(1, Config(epochs=2)), Struct((Point(3),))]
    assert kwargs.pop("array").tolist() == [1, 2]
    assert kwargs == {
        "config": Config(epochs=4, lr=1.0),
        "number": "as it came",
        "colour": Colour.RED,
    }


@pytest.mark.parametrize(
    ("hint", "came", "made"),
    [
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[int], [1, 1], {1}),
        (dict[str, Point], {"a": {"x": 1}}, {"a": Point(1)}),
        (list[Point] | None, None, None),
        (Annotated[Point, "about"], {"x": 1}, Point(1)),
        (Sequence[Point], [{"x": 1}], [Point(1)]),
        (dt.date, "2026-01-02", dt.date(2026, 1, 2)),
        (dt.date, dt.date(2026, 1, 2), dt.date(2026, 1, 2)),
        (Config, Config(epochs=1), Config(epochs=1)),
        (Mixed, "b", Mixed.WORD),
        (Mixed, "PAIR", Mixed.PAIR),
        (list[Mixed], [[1, 2], 0.5], [Mixed.PAIR, Mixed.HALF]),
        (Mixed | None, None, None),
        (Scaled, {"x": 1, "kind": [1, 2]}, Scaled(1, 2, Mixed.PAIR)),
        (Around, {"inner": [{"x": 1, "scale": 3}]}, Around([Scaled(1, 3)])),
        (Named, {"sizeOf": 1}, Named(sizeOf=1)),
        (Named, {"size": 1, "double": 2}, Named(sizeOf=1)),
    ],
)
def test_fitting_value_is_kept(hint: Any, came: object, made: object) -> None:
    def f(x: Any) -> None: ...

    f.__annotations__["x"] = hint

    assert bound(f, came) == ([made], {})


@pytest.mark.parametrize(
    "hint",
    [
        *(int, list[float], Any, str | None, Unknown, "Nowhere", Point | Unknown),
        *(Callable[[int], Point], dt.datetime | str),
    ],
)
def test_plain_hint_changes_nothing(hint: Any) -> None:
    def f(x: Any) -> None: ...

    f.__annotations__["x"] = hint

    assert binder(RegisteredTask("f", f), exact=False) is None


ALIASES = """
type Points = list[Point]
type Pair[T] = tuple[T, T]
type Tree = Point | list[Tree]
type Numbers = list[int]
type Lost = list[Nowhere]
"""


if sys.version_info >= (3, 12):  # before, there are no aliases

    def test_type_alias_is_resolved() -> None:
        def f(x: Any) -> None: ...

        aliases: dict[str, Any] = {"Point": Point}
        exec(ALIASES, aliases)

        f.__annotations__["x"] = aliases["Points"]
        assert bound(f, [{"x": 1}]) == ([[Point(1)]], {})
        f.__annotations__["x"] = aliases["Pair"][Point] | None
        assert bound(f, [{"x": 1}, {"x": 2}]) == ([(Point(1), Point(2))], {})
        for name in ("Tree", "Numbers", "Lost"):
            f.__annotations__["x"] = aliases[name]
            assert binder(RegisteredTask("f", f), exact=False) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([{"x": "one"}], {}, r"^point: Expected `int`, got `str` - at `\$\.x`$"),
        ([{}], {}, r"^point: Object missing required field `x`$"),
        ([5], {}, "^point: Expected `object`, got `int`$"),
        ([{"x": 1}, 5], {}, r"^more\[1\]: Expected `object`"),
        ([], {"point": None}, "^point: Expected `object`, got `null`$"),
    ],
)
def test_error_names_the_invalid_argument(
    args: list[Any], kwargs: dict[str, Any], message: str
) -> None:
    def f(point: Point, *more: Struct) -> None: ...

    with pytest.raises(ValueError, match=message):
        bound(f, *args, **kwargs)


class Row(NamedTuple):
    x: int


def injecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function: it gets one more argument than it is called with."""

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function("injected", *args, **kwargs)

    return inner


def test_each_hint_is_used_alone() -> None:
    def f(
        row: Row, absent: "Fraction", many: Iterable[Row], by: dict[Literal["a"], Row]
    ) -> None: ...

    args, _ = bound(f, [1], {"b": 2}, [[3]], {"a": [4]})

    assert args == [Row(1), {"b": 2}, [Row(3)], {"a": Row(4)}]
    assert [type(each) for each in (args[0], args[2][0], args[3]["a"])] == [Row] * 3


def test_decorator_may_inject_arguments_so_others_are_converted_by_name() -> None:
    @injecting
    def f(injected: str, point: Point, *points: Point) -> None: ...

    with pytest.raises(TypeError, match=r"may be for point or points, .* by name"):
        bound(f, {"x": 1})
    assert bound(f, point={"x": 1}) == ([], {"point": Point(1)})


def test_decorator_injects_none_if_all_arguments_are_given() -> None:
    @injecting
    def f(
        point: Point, size: int, other: Point | None = None, *, last: int = 0
    ) -> None: ...

    args, kwargs = bound(f, {"x": 1}, 2, other={"x": 3})
    assert (args, kwargs) == ([Point(1), 2], {"other": Point(3)})
    with pytest.raises(TypeError, match=r"args\[0\]: it may be for point or other"):
        bound(f, {"x": 1}, 2)
    with pytest.raises(ValueError, match="point: "):
        bound(f, {"y": 1}, 2, other=None)


def test_decorated_arguments_that_no_hint_converts_stay_as_they_came() -> None:
    @injecting
    def f(injected: str, size: int, *, point: Point) -> None: ...

    assert bound(f, 3, point={"x": 1}) == ([3], {"point": Point(1)})


def test_excess_arguments_are_left_to_the_function() -> None:
    def f(point: Point) -> None: ...

    assert bound(f, {"x": 1}, 2, z=3) == ([Point(1), 2], {"z": 3})


@pytest.mark.parametrize("schema", [Config, Point])
def test_schema_is_built_from_a_map_or_keyword_arguments(schema: type) -> None:
    fields = {"epochs": 2} if schema is Config else {"x": 2}
    bind = binder(RegisteredTask("f", lambda config: None, schema), exact=False)
    assert bind is not None

    assert bind([fields], {}) == ([schema(**fields)], {})
    assert bind([], dict(fields)) == ([schema(**fields)], {})
    for args, kwargs in (([1], {}), ([fields, 1], {}), ([fields], {"x": 1})):
        with pytest.raises(TypeError, match="f takes one map, or its fields"):
            bind(args, kwargs)


def test_pydantic_error_is_kept() -> None:
    bind = binder(RegisteredTask("f", lambda config: None, Config), exact=False)
    assert bind is not None

    with pytest.raises(ValidationError, match="epochs"):
        bind([{"epochs": "x"}], {})


@pytest.mark.parametrize(
    ("hint", "came", "said"),
    [
        (Mixed, True, "x: expected a value of Mixed: 'WORD', 'HALF', 'PAIR'"),
        (Scaled, {"y": 1}, "unexpected keyword argument 'y'"),
        (Around, {"inner": [{"x": "no"}]}, "Expected `int`, got `str`"),
        (Scaled, [1], "x: expected Scaled, got list"),
    ],
)
def test_value_that_fits_no_constructor_is_refused(
    hint: Any, came: object, said: str
) -> None:
    def f(x: Any) -> None: ...

    f.__annotations__["x"] = hint

    with pytest.raises(ValueError, match=re.escape(said)):
        bound(f, came)


def test_hints_that_cannot_be_used_are_named() -> None:
    def f(
        a: int,
        b: Point,
        c: "Fraction | None",
        d: Point | Config,
        e: Mixed,
        g: Unknown,
        h: Callable[[int], str],
    ) -> None: ...

    assert unused_hints(f) == ["c", "d"]
