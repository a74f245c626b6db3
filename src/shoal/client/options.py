"""The options of calls."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Literal, TypeAlias, TypedDict

from msgspec import structs

from shoal.domain.errors import InvalidRequest
from shoal.domain.job import Gang

Priority: TypeAlias = Literal["low", "normal", "high"]
OnProgress: TypeAlias = Callable[[float | None, str], object]
"""Receives the progress of a call: a share from 0 to 1, and a remark."""

SECONDS_MAX = 86_400.0  # limit of the time to wait, and to run
KEY_MAX = 240  # characters; leaves room for the index of a map's call
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
    exact: bool
    wait: bool
    gang: Gang | None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a call.

    ``timeout`` limits its running time and ``queue`` its waiting time, in seconds; None
    means the coordinator's limit.  ``key`` is an idempotency key.  A ``durable`` call
    is a stored job; another one is lost with the connection or the coordinator, and is
    sent again only with ``retry``.  ``exact`` is as in ``Call``.  With ``wait`` a call
    of a task that no worker has waits for one, and is not refused.  ``gang`` is for
    training runs: the call's place among calls that start together.

    Raises InvalidRequest.
    """

    timeout: float | None = None
    key: str = ""
    priority: Priority = "normal"
    durable: bool = True
    queue: float | None = None
    on_progress: OnProgress | None = None
    retry: bool = False
    exact: bool = True
    wait: bool = False
    gang: Gang | None = None

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
                f"key=…: {len(self.key)} characters exceed the limit of {KEY_MAX}",
                "key",
            )
        if self.key and not self.durable:
            raise InvalidRequest(
                "key=…: requires a durable call; leave out durable=False", "key"
            )
        if self.on_progress is not None and self.key:
            raise InvalidRequest(
                "on_progress=…: a call with a key reports no progress, since it may "
                "outlive its caller; leave out key=…",
                "on_progress",
            )
        if self.on_progress is not None and not self.durable:
            raise InvalidRequest(
                "on_progress=…: only durable calls report progress; leave out "
                "durable=False, or use with_options(durable=True, on_progress=…)",
                "on_progress",
            )
        if self.gang is not None and not self.durable:
            raise InvalidRequest(
                "gang=…: requires durable calls; leave out durable=False", "gang"
            )

    def encode(self) -> dict[str, object]:
        """Return the wire form, without the key, which may get an index."""
        options: dict[str, object] = {
            "timeout": None if self.timeout is None else float(self.timeout),
            "queue": None if self.queue is None else float(self.queue),
            "priority": None if self.priority == "normal" else self.priority,
            "kept": None if self.durable else False,
            "progress": None if self.on_progress is None else True,
            "wait": self.wait or None,
            "gang": None if self.gang is None else structs.asdict(self.gang),
        }
        return {name: value for name, value in options.items() if value is not None}


def with_changes(options: Options, changes: OptionChanges) -> Options:
    """Return the options with changes.

    Raises InvalidRequest if they are inconsistent, TypeError for an unknown option.
    """
    names = [each.name for each in fields(Options)]
    for name in changes:
        if name not in names:
            matches = get_close_matches(name, names, n=1)
            suggestion = f"did you mean {matches[0]}? " if matches else ""
            raise TypeError(
                f"with_options() has no {name}=…: {suggestion}Options: "
                f"{', '.join(names)}"
            )
    return replace(options, **changes)


def reject_unknown_arguments(class_name: str, names: Iterable[str]) -> None:
    """Raise TypeError for unknown arguments of a pool, saying where they belong."""
    for name in names:
        raise TypeError(
            f"{class_name}() has no {name}=…: {_ADVICE.get(name, _ARGUMENTS)}"
        )


_ARGUMENTS = "its arguments are url, api_key, durable, trust_code, data_dir and cacert"
_SLOTS = "workers set the number of concurrent calls: shoal join … --slots 4"
_ADVICE: Mapping[str, str] = {
    **{
        each.name: f"it is an option of calls: pool.with_options({each.name}=…)"
        for each in fields(Options)
        if each.name != "durable"
    },
    "max_workers": _SLOTS,
    "processes": _SLOTS,
    "n_jobs": _SLOTS,
}


log = logging.getLogger("shoal")


def report_progress(progress: OnProgress, share: float | None, remark: str) -> None:
    """Call the program's function; its exceptions are logged."""
    try:
        progress(share, remark)
    except Exception:
        # The program's code must not end the thread of all calls.
        log.exception("on_progress raised an error; the call goes on")
