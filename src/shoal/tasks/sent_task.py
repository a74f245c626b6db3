"""Tasks that are sent to a worker which cannot import their module.

The functions of a program's ``__main__`` and of notebooks are such tasks.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

from shoal.tasks.registry import TASKS, RegisteredTask
from shoal.tasks.schemas import Bind, binder

_NAME = "_shoal_call_name"
F = TypeVar("F", bound=Callable[..., object])


def sent_as(name: str) -> Callable[[F], F]:
    """Name the calls of a function that is sent along: workers recognise it by that."""

    def mark(function: F) -> F:
        setattr(function, _NAME, name)
        return function

    return mark


def call_name(function: object) -> str:
    """Return the name of the calls of a function that is sent along."""
    own = getattr(function, "__qualname__", type(function).__qualname__)
    return str(getattr(function, _NAME, own))


class SentTask:
    """A task as code: its function, and how its arguments are converted.

    It is pickled by the client; a worker binds arguments as it does for its own tasks.
    """

    def __init__(self, task: RegisteredTask) -> None:
        self.function: Callable[..., Any] = task.function
        self._name = task.name
        self._schema = task.schema
        self.openai = task.openai

    def bind(
        self, args: list[Any], kwargs: dict[str, Any], *, exact: bool
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Convert the arguments of a call.  Raises as ``binder``'s converter does."""
        bind = self._exact_bind if exact else self._bind
        return (args, kwargs) if bind is None else bind(args, kwargs)

    @cached_property
    def _bind(self) -> Bind | None:
        return binder(self._task, exact=False)

    @cached_property
    def _exact_bind(self) -> Bind | None:
        return binder(self._task, exact=True)

    @property
    def _task(self) -> RegisteredTask:
        return RegisteredTask(self._name, self.function, self._schema)


def task_in_main(name: str) -> RegisteredTask | None:
    """Return a task of the program itself; None if a module or nothing defines it."""
    task = TASKS.get(name)
    return task if task and task.function.__module__ == "__main__" else None
