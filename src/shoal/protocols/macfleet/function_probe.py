"""Finds out which functions a MacFleet worker has, by calling one that does not exist.

The wire has no message for it, but a worker answers a call of an unknown function with
the names of its functions (``docs/protocols/macfleet.md``).  A peer that does not
answer is not a worker, or is a worker that serves another coordinator.
"""

import re

from shoal.domain.vocabulary import OffersChanged
from shoal.domain.work import JobKind
from shoal.domain.worker import Offer
from shoal.protocols.macfleet.codec.frames import FrameType, write_frame
from shoal.protocols.macfleet.codec.tasks import TaskResult, encode_task
from shoal.protocols.macfleet.codec.values import NO_ARGS, NO_KWARGS
from shoal.protocols.seam.session import Output

CARRIED_KINDS = frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM})
"""The kinds of jobs that this wire supports."""

PROBE_FUNCTION = "shoal.which"  # a function that no worker has
PROBE_TIMEOUT = 10.0  # seconds, in case a worker does have it
NAMES_MAX = 4096  # functions that are kept for a worker
NAME_MAX = 256  # characters of a function's name
LIST_MAX = 1 << 20  # characters of an error that are parsed

_UNKNOWN_FUNCTION = re.compile(
    r"(?:[\w.]{1,200}\.)?TaskNotRegisteredError: Task .{1,600} not registered on this "
    r"worker\. Known tasks: \[(?P<names>.*)\]\s*\Z",
    re.DOTALL,
)
_NAME = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.S)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


class FunctionProbe:
    """The probe of one peer; ``slots`` is the number of slots a worker is given."""

    def __init__(self, task_id: str, slots: int) -> None:
        self._task_id = task_id
        self._slots = slots

    def encode_request(self) -> Output:
        """Return the probe's TASK frame."""
        return write_frame(
            FrameType.TASK,
            *encode_task(
                self._task_id, PROBE_FUNCTION, NO_ARGS, NO_KWARGS, PROBE_TIMEOUT
            ),
        )

    def offer_from(self, result: TaskResult) -> OffersChanged | None:
        """Return the worker's offer, if a result answers the probe.

        Without a list of its functions, it may have any.
        """
        if result.task_id != self._task_id:
            return None
        names = known_functions(result.error) if result.error else None
        if names is not None and not names:
            return OffersChanged(())
        offer = Offer(
            kinds=CARRIED_KINDS,
            slots=self._slots,
            tasks=names or frozenset(),
            streams=False,
            receipts=False,
        )
        return OffersChanged((offer,))


def is_unknown_function(error: str) -> bool:
    """Say whether a task failed because the worker does not have the function."""
    return _function_list(error) is not None


def known_functions(error: str) -> frozenset[str] | None:
    """Return the names of a worker's functions; None if it does not list them.

    A list that is truncated or contains anything but names counts as none.
    """
    listed = _function_list(error)
    if not listed:
        return None if listed is None else frozenset()
    names: set[str] = set()
    at = 0
    while (match := _NAME.match(listed, at)) is not None:
        name = _ESCAPE.sub(_unescape, match[1] if match[1] is not None else match[2])
        if name and len(name) <= NAME_MAX and len(names) < NAMES_MAX:
            names.add(name)
        at = match.end()
        if at == len(listed):
            return frozenset(names)
        if not listed.startswith(", ", at):
            return None
        at += 2
    return None


def _function_list(error: str) -> str | None:
    """Return the text between the brackets in the last line of a traceback."""
    last = error[-LIST_MAX:].rstrip().rpartition("\n")[2]
    match = _UNKNOWN_FUNCTION.match(last)
    return None if match is None else match["names"]


def _unescape(match: re.Match[str]) -> str:
    """Return the character that an escape in a Python string literal stands for.

    An invalid escape is returned unchanged.
    """
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return _ESCAPED.get(match[4], match[4])
    code = int(digits, 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else match[0]
