"""The port to whoever collects payments that come with a request, from elsewhere.

Without anybody nothing is due: what jobs cost then only goes through the accounts.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.errors import PaymentDue


@dataclass(frozen=True, slots=True)
class Charge:
    """What is to be paid, and for what.

    ``headers`` are those of the request, by their names in lower case: what pays is
    among them.
    """

    url: str
    description: str
    price: int  # micro-dollars
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class SettledPayment:
    """A payment that was taken; ``headers`` tell the payer so."""

    reference: str  # what it is known by where it was made
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfferedPayment:
    """A payment that is good, as far as can be told before it is taken.

    ``settle`` takes it, once.  It raises PaymentDue if that fails, and PaymentsDown if
    whoever collects cannot be asked.  ``used`` is what to raise of one that turns out
    to have paid for something else.
    """

    settle: Callable[[], Awaitable[SettledPayment]]
    used: PaymentDue


class Payments(Protocol):
    """Collects payments."""

    async def verify(self, charge: Charge) -> OfferedPayment | None:
        """Return the payment that a request offers; None if nothing is due.

        Raises PaymentDue if there is none, or it is no good, and PaymentsDown if
        whoever collects cannot be asked now.
        """
        ...

    async def close(self) -> None: ...


class NoPayments:
    """Nothing is ever due."""

    async def verify(self, charge: Charge) -> None:
        return None

    async def close(self) -> None:
        pass


NO_PAYMENTS = NoPayments()
