"""Classes of the values that tests send, in a module that others can import."""

import enum
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, NamedTuple

import msgspec
import pydantic


@dataclass
class Angle:
    """An angle that is given in degrees, and kept in half turns."""

    value: float

    def __post_init__(self) -> None:
        self.value /= 180


@dataclass
class Shape:
    name: str
    parts: Any = None


@dataclass
class Circle(Shape):
    radius: Any = 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: int = field(init=False, default=0)


@dataclass
class Scaled:
    x: int
    scale: InitVar[int] = 1
    total: int = field(init=False, default=0)

    def __post_init__(self, scale: int) -> None:
        self.total = self.x * scale


class Slotted:
    __slots__ = ("__weakref__", "x")


@dataclass
class Mixed(Slotted):
    """Some of its attributes are slots."""

    y: Any = 0


class Doubled(msgspec.Struct):
    x: Any

    def __post_init__(self) -> None:
        self.x = [self.x]


class Fragile(msgspec.Struct):
    """It can be made once."""

    x: Any
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Fragile.made += 1
        if Fragile.made > 1:
            raise RuntimeError("made twice")


class Fixed(msgspec.Struct, frozen=True):
    x: Any = None


class Pair(NamedTuple):
    x: Any
    y: Any


class Planet(enum.Enum):
    EARTH = (5.9, 6.3)
    MARS = "mars"


class Size(enum.IntEnum):
    BIG = 3


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Price(pydantic.BaseModel):
    """A price that is given in units, and kept in cents."""

    cents: int
    note: Any = pydantic.Field(default=None, exclude=True)
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("cents", mode="before")
    @classmethod
    def to_cents(cls, value: int) -> int:
        return value * 100


class Login(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    password: pydantic.SecretStr
    user: str = pydantic.Field(alias="userName")


class Outer:
    @dataclass
    class Inner:
        x: Any


class Masked(str):
    """A text that shows something else."""

    __slots__ = ()

    def __str__(self) -> str:
        return "***"


class Plain:
    """A class of no kind that is sent."""
