"""The port of usage: what was used of which model, on which node, by which key, a day.

``Store.append`` counts the usage of a job together with its end.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

UsageField: TypeAlias = Literal["day", "key", "model", "node"]
"""What usage can be added up by, in the order in which lists are sorted."""

USAGE_DAYS = (
    400  # for which it is kept, so that a month can be compared with last year's
)
ROWS_PER_DAY_MAX = 10_000  # of keys, models and nodes; beyond it only the key is named


class JobPlace(NamedTuple):
    """The node that ran a job, and what the job cost its owner in micro-dollars.

    The node is empty for a call of a function; one that was free has no place.
    """

    node: str
    cost: int


NO_PLACE = JobPlace("", 0)


class Refund(NamedTuple):
    """Micro-dollars given back to the owner of a job that was counted before."""

    owner: str
    model: str
    node: str
    amount: int


@dataclass(frozen=True, slots=True)
class UsageSum:
    """Usage added up; None where it was not told apart.

    ``day`` is a ``day_of``.  Model and node are empty for calls of functions, and for
    usage of which they are not known.
    """

    day: int | None
    key: str | None
    model: str | None
    node: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: int  # micro-dollars


class UsageStore(Protocol):
    """Usage by day, key, model and node."""

    async def sums(
        self,
        since: int,
        until: int,
        by: Collection[UsageField],
        limit: int,
        owner: str | None = None,
    ) -> list[UsageSum]:
        """Add up the usage of the days from ``since`` to ``until``, both included.

        Returns at most ``limit`` sums.  ``owner``: only the usage of the keys of this
        name.  Raises StoreError.
        """
        ...
