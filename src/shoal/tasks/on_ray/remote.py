"""What runs in the processes of a Ray cluster: calls, and lanes of them."""

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import msgspec
import ray

from shoal import __version__
from shoal.domain.errors import ConfigError, Unavailable
from shoal.tasks.limits import MAPPED_MAX
from shoal.tasks.progress import tell_progress_to
from shoal.tasks.running import LACKING, Returned, Running, Step, prepared

Said: TypeAlias = tuple[float | None, str]

DESK = "shoal-desk"  # its name, which Ray keeps apart for each driver

TELLING = "telling"  # the threads of lanes that tell what has returned

_pushed = msgspec.msgpack.Decoder(list[tuple[int, bytes, bytes]])
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Tasks:
    """Which functions there are to be, and whether others are called as well."""

    modules: tuple[str, ...]
    trust: bool
    version: str = __version__


class Work(NamedTuple):
    """A call, with its arguments in MessagePack."""

    number: int
    name: str
    code: bool
    timed: bool
    args: bytes
    kwargs: bytes


@cache
def _desk() -> Any:
    """Return the desk of this worker, which is looked up only where it is needed.

    To be given it with each call would take longer than many a call does.
    """
    return ray.get_actor(DESK)


def known(tasks: Tasks) -> dict[str, float | None] | str:
    """Return the tasks, with the timeouts that they have, or why there are none."""
    if tasks.version != __version__:
        return (
            f"the Ray cluster has shoal {__version__}, and this is {tasks.version}; "
            f"install the same there: pip install 'shoal=={tasks.version}'"
        )
    try:
        return prepared([*tasks.modules])
    except ConfigError as error:
        return str(error)


def call(tasks: Tasks, slot: int, work: Work) -> tuple[Returned, Said | None]:
    """Make one call; return also what it said last of its progress.

    That may still be under way elsewhere when the call has returned.
    """
    said: Said | None = None

    def say(share: float | None, remark: str) -> None:
        nonlocal said
        said = share, remark
        _desk().say.remote(slot, work.number, share, remark)

    step = _step(tasks, slot, work.name, work.code)
    if work.timed:
        _desk().begin.remote(slot, work.number)
    tell_progress_to(say)
    returned = step(work.args, work.kwargs)
    tell_progress_to(None)
    return returned, said


class Lane:
    """An actor that calls one function again and again.

    ``push`` and ``take`` run at the same time: what has returned is told while the
    next call runs, which may hold up nobody but itself.
    """

    def __init__(self, tasks: Tasks, slot: int, name: str, code: bool) -> None:
        self._step = _step(tasks, slot, name, code)
        self._returns: list[tuple[int, bytes, str]] = []
        self._some = threading.Condition()

    def begin(self) -> None:
        """Return as soon as calls can be made."""

    def push(self, calls: bytes) -> None:
        """Make calls, as they were pushed; ``take`` has what they return."""
        for number, args, kwargs in _pushed.decode(calls):
            value, error, _ = self._step(args, kwargs)
            with self._some:
                self._returns.append((number, value, error))
                self._some.notify()

    @ray.method(concurrency_group=TELLING)  # type: ignore[untyped-decorator]  # Ray's
    def take(self) -> bytes:
        """Wait until some have returned; return them all, in MessagePack."""
        with self._some:
            self._some.wait_for(lambda: self._returns)
            returns, self._returns = self._returns, []
        return _encode(returns)

    def make(self, number: int, args: bytes, kwargs: bytes) -> bytes:
        """Make a call, and return what it does as ``take`` would."""
        value, error, _ = self._step(args, kwargs)
        return _encode([(number, value, error)])


def _step(tasks: Tasks, slot: int, name: str, code: bool) -> Step:
    try:
        return _running(tasks, slot).step(name, code=code)
    except ConfigError as error:
        # The node that was asked at first could import what this one cannot.
        why = f"on this node of the Ray cluster: {error}"
        return lambda args, kwargs: Returned(b"", why, LACKING)


def _running(tasks: Tasks, slot: int) -> Running:
    """Return the functions of this process, which takes calls for any slot."""
    blobs = _blobs()
    blobs.slot = slot
    return _functions(tasks)


@cache
def _functions(tasks: Tasks) -> Running:
    prepared([*tasks.modules])
    return Running(_blobs().get, trust=tasks.trust)


class Blobs:
    """Large arguments that this process has used, which lie in Ray's object store."""

    def __init__(self) -> None:
        self.slot: int | None = None
        self._mapped: dict[bytes, memoryview] = {}  # the latest used is last

    def get(self, digest: bytes) -> memoryview:
        """Return a value in MessagePack; raises Unavailable if nobody gives it."""
        found = self._mapped.pop(digest, None)
        if found is None:
            found = self._ask(digest)
        self._mapped[digest] = found
        if len(self._mapped) > MAPPED_MAX:
            del self._mapped[next(iter(self._mapped))]
        return found

    def _ask(self, digest: bytes) -> memoryview:
        try:
            references, why = ray.get(_desk().blob.remote(self.slot, digest))
            if not references:
                raise Unavailable(why)
            return memoryview(ray.get(references[0]))
        except (ray.exceptions.RayError, ValueError) as error:
            raise Unavailable(f"a large argument is lost: {error}") from error


@cache
def _blobs() -> Blobs:
    return Blobs()
