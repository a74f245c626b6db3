"""The port to payment services, which collect payments that come with a request.

Without one, prices of jobs are only charged to accounts.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from shoal.domain.errors import PaymentDue


@dataclass(frozen=True, slots=True)
class Charge:
    """The price of a request.

    ``headers`` are the request's, with names in lower case; one of them carries the
    payment.
    """

    url: str
    description: str
    price: int  # micro-dollars
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class SettledPayment:
    """A settled payment; ``headers`` confirm it to the payer."""

    reference: str  # its id where it was made
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfferedPayment:
    """A verified payment that is not settled yet.

    ``settle`` settles it, once.  It raises PaymentDue if that fails, and PaymentsDown
    if the payment service is unavailable.  ``nonce`` is what the payer's signature can
    pay for once, whatever the service says of it.  ``used`` is the error for a payment
    that was used before.
    """

    settle: Callable[[], Awaitable[SettledPayment]]
    nonce: str
    used: PaymentDue


class Payments(Protocol):
    """A payment service."""

    async def verify(self, charge: Charge) -> OfferedPayment | None:
        """Return the payment that a request offers; None if nothing is due.

        Raises PaymentDue if the payment is missing or invalid, and PaymentsDown if the
        service is unavailable.
        """

    async def close(self) -> None: ...


class NoPayments:
    """No payment service: nothing is ever due."""

    async def verify(self, charge: Charge) -> None:
        return None

    async def close(self) -> None:
        pass


NO_PAYMENTS = NoPayments()
