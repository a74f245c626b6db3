"""What an agent needs from around it."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeAlias

from shoal.domain.sharing import ModelAnswer, ModelQuery, ModelRequest, ModelWord
from shoal.domain.worker import Condition, Health
from shoal.runtime.link import Link

Dial: TypeAlias = Callable[
    [str, Mapping[str, str], int],
    AbstractAsyncContextManager[tuple[Link, Mapping[str, str]]],
]
"""Opens a connection: to a URL, with headers, for messages of so many bytes."""

Say: TypeAlias = Callable[[ModelWord], bool]
Room: TypeAlias = Callable[[], Awaitable[None]]
Share: TypeAlias = Callable[[ModelWord, Say, Room], None]
"""Takes a word about a model to be copied, and what answers it: never waits.

The answer is said by the second, which returns False if nobody is there any more; the
third waits until there is room for more of it.
"""


def share_nothing(word: ModelWord, say: Say, room: Room) -> None:
    """Say that there are no models to be copied here."""
    if isinstance(word, (ModelQuery, ModelRequest)):
        say(ModelAnswer(word.model, available=False))


@dataclass(frozen=True, slots=True)
class Machine:
    """How this machine can be asked how it is doing."""

    measure: Callable[[], Health]
    condition: Callable[[], Condition] = Condition
