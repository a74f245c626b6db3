"""Finding out what a peer that is not ours can do: the wire has no word for it.

A worker answers whatever it is asked; to a function that it does not have it answers
with the names of those that it has (``docs/protocols/macfleet.md``).  Whoever does not
answer is no worker, or one that listens to another coordinator.
"""

import re

from shoal.domain.vocabulary import OffersChanged
from shoal.protocols.macfleet.codec.tasks import (
    NO_ARGS,
    NO_KWARGS,
    TaskResult,
    encode_task,
)
from shoal.protocols.macfleet.peer_state import upstream_offer

PROBE_FUNCTION = "shoal.which"  # a function that nobody has
PROBE_TIMEOUT = 10.0  # seconds, should there be such a function after all
NAMES_MAX = 4096  # that are believed of a worker
NAME_MAX = 256  # characters of one of them
LIST_MAX = 1 << 20  # characters of a list that are looked at

_UNKNOWN_FUNCTION = re.compile(
    r"(?:[\w.]{1,200}\.)?TaskNotRegisteredError: Task .{1,600} not registered on this "
    r"worker\. Known tasks: \[(?P<names>.*)\]\s*\Z",
    re.DOTALL,
)
_NAME = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


class FunctionProbe:
    """The question to one peer; ``slots`` is what a worker gets at a time."""

    def __init__(self, task_id: str, slots: int) -> None:
        self._task_id = task_id
        self._slots = slots

    def encode_request(self) -> bytes:
        """Return the payload of the TASK frame that asks."""
        return encode_task(
            self._task_id, PROBE_FUNCTION, NO_ARGS, NO_KWARGS, PROBE_TIMEOUT
        )

    def offer_from(self, result: TaskResult) -> OffersChanged | None:
        """Return what a result says that the peer does, if it is the answer."""
        if result.task_id != self._task_id:
            return None
        names = known_functions(result.error) if result.error else None
        return OffersChanged(upstream_offer(names, self._slots))


def is_unknown_function(error: str) -> bool:
    """Say whether a task failed because its worker has no function of that name."""
    return _function_list(error) is not None


def known_functions(error: str) -> frozenset[str] | None:
    """Return the functions that a worker says it has; None if it does not say.

    A list that does not end within what is looked at, or has other things than names
    in it, says nothing.
    """
    listed = _function_list(error)
    if not listed:
        return None if listed is None else frozenset()
    names: set[str] = set()
    at = 0
    while (found := _NAME.match(listed, at)) is not None:
        name = _ESCAPE.sub(_unescape, found[1] if found[1] is not None else found[2])
        if name and len(name) <= NAME_MAX and len(names) < NAMES_MAX:
            names.add(name)
        at = found.end()
        if at == len(listed):
            return frozenset(names)
        if not listed.startswith(", ", at):
            return None
        at += 2
    return None


def _function_list(error: str) -> str | None:
    """Return what is between the brackets in the last line of a traceback."""
    last = error[-LIST_MAX:].rstrip().rpartition("\n")[2]
    found = _UNKNOWN_FUNCTION.match(last)
    return None if found is None else found["names"]


def _unescape(found: re.Match[str]) -> str:
    """Return the character that an escape in Python's way of writing texts stands for.

    One that stands for none stays as it is.
    """
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return _ESCAPED.get(found[4], found[4])
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else found[0]
