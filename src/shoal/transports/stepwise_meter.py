"""Measures a coroutine step by step, without what runs while it waits."""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StepwiseMeter(Generator[Any, Any, T], Generic[T]):
    """Awaits ``work``, and charges what each of its steps took by a ``meter``.

    ``meter`` returns seconds, such as the CPU time of the loop's thread.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        meter: Callable[[], float],
        charge: Callable[[float], None],
    ) -> None:
        self._work = work
        self._meter = meter
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        began = self._meter()
        try:
            return self._work.send(value)
        finally:
            self._charge(self._meter() - began)

    def throw(self, *error: Any) -> Any:
        began = self._meter()
        try:
            return self._work.throw(*error)
        finally:
            self._charge(self._meter() - began)
