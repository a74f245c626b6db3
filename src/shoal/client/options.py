"""The options of calls."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Literal, TypeAlias, TypedDict

from shoal.domain.errors import InvalidRequest

Priority: TypeAlias = Literal["low", "normal", "high"]
OnProgress: TypeAlias = Callable[[float | None, str], object]
"""Is told how far a call has come, from 0 to 1, and what it says about that."""

SECONDS_MAX = 86_400.0  # that a call may wait, or run
KEY_MAX = 240  # characters, so that there is room for the numbers of a map's calls
PRIORITIES = ("low", "normal", "high")


class OptionChanges(TypedDict, total=False):
    """Some of the fields of ``Options``."""

    timeout: float | None
    key: str
    priority: Priority
    durable: bool
    queue: float | None
    on_progress: OnProgress | None
    retry: bool


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about calls beside the function and its arguments.

    ``timeout`` is for how many seconds a call may run and ``queue`` for how many it may
    wait for a worker; None: as the coordinator has it.  ``key`` names a call, so that
    asking again under the same name finds it.  A ``durable`` call is a job like any
    other; one that is not is forgotten if the coordinator or the connection ends, and
    asked for again only with ``retry``.

    Raises InvalidRequest.
    """

    timeout: float | None = None
    key: str = ""
    priority: Priority = "normal"
    durable: bool = True
    queue: float | None = None
    on_progress: OnProgress | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        for name in ("timeout", "queue"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds <= SECONDS_MAX:
                raise InvalidRequest(
                    f"{name}={seconds!r}: expected seconds, more than 0 and at most "
                    f"{SECONDS_MAX:.0f}",
                    name,
                )
        if self.priority not in PRIORITIES:
            raise InvalidRequest(
                f"priority={self.priority!r}: expected one of {', '.join(PRIORITIES)}",
                "priority",
            )
        if len(self.key) > KEY_MAX:
            raise InvalidRequest(
                f"key=…: it has {len(self.key)} characters, and may have {KEY_MAX}",
                "key",
            )
        if self.key and not self.durable:
            raise InvalidRequest(
                "key=…: only durable calls have one; leave out durable=False",
                "key",
            )
        if self.on_progress is not None and self.key:
            raise InvalidRequest(
                "on_progress=…: a call with a key goes on without whoever asked for "
                "it, and tells nobody of its progress; leave out key=…",
                "on_progress",
            )
        if self.on_progress is not None and not self.durable:
            raise InvalidRequest(
                "on_progress=…: only durable calls tell of their progress; leave out "
                "durable=False, or say with_options(durable=True, on_progress=…)",
                "on_progress",
            )

    def encode(self) -> dict[str, object]:
        """Return them as the wire has them, but for the key, which may be counted."""
        options: dict[str, object] = {}
        if self.timeout is not None:
            options["timeout"] = float(self.timeout)
        if self.queue is not None:
            options["queue"] = float(self.queue)
        if self.priority != "normal":
            options["priority"] = self.priority
        if not self.durable:
            options["kept"] = False
        if self.on_progress is not None:
            options["progress"] = True
        return options


def with_changes(options: Options, changes: OptionChanges) -> Options:
    """Return the same terms, but for what is changed.

    Raises InvalidRequest if they make no sense, TypeError if there is no such option.
    """
    names = [each.name for each in fields(Options)]
    for name in changes:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise TypeError(
                f"with_options() has no {name}=…: {meant}There is {', '.join(names)}"
            )
    return replace(options, **changes)


def reject_unknown_arguments(what: str, names: Iterable[str]) -> None:
    """Say where what is no argument of a pool belongs.

    Raises TypeError if there is anything.
    """
    for name in names:
        raise TypeError(f"{what}() has no {name}=…: {_BELONGS.get(name, _NO_SUCH)}")


_NO_SUCH = "its arguments are url, api_key, durable, trust_code, data_dir and cacert"
_SLOTS = "how many calls run at a time is said where they run: shoal join … --slots 4"
_BELONGS: Mapping[str, str] = {
    **{
        each.name: f"say it of calls: pool.with_options({each.name}=…)"
        for each in fields(Options)
        if each.name != "durable"
    },
    "max_workers": _SLOTS,
    "processes": _SLOTS,
    "n_jobs": _SLOTS,
}


log = logging.getLogger(__name__)


def report_progress(progress: OnProgress, share: float | None, remark: str) -> None:
    """Call the program's function; what it raises is logged, and ends nothing."""
    try:
        progress(share, remark)
    except Exception:
        # It is the caller's code, in a thread that carries everybody's calls.
        log.exception("on_progress raised an error; the call goes on")
