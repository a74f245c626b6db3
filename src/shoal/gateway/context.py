"""What every face of the gateway works with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.hub import Hub
from shoal.domain.moderation import Moderation
from shoal.domain.work import TimeLimits
from shoal.gateway.http.access import Access
from shoal.gateway.http.body import BodyReader
from shoal.gateway.jobs.egress_policy import EgressPolicy
from shoal.gateway.jobs.payments import NO_PAYMENTS, Payments
from shoal.ledger.prices import PriceList
from shoal.protocols.seam.endpoints import MembershipProber
from shoal.store.port import KeyStore, Store
from shoal.transports.clock import Clock


@dataclass(frozen=True, slots=True)
class Gateway:
    """The coordinator, as the HTTP faces see it.

    ``new_secret`` makes what keys and tokens are made of.  ``moderation_bypass`` names
    the keys whose requests are not moderated.  ``anonymous`` names the wires whose
    own HTTP API takes no key, and ``webhooks`` says who may be told of a job's end;
    ``payments`` collects what they cost, and ``being_paid`` has the owners and
    idempotency keys of those for which it just does.  ``rounds`` are those of each wire
    that keeps an eye on other nodes.
    """

    hub: Hub
    store: Store
    clock: Clock
    keys: KeyStore
    access: Access
    door: WorkerAdmission
    limits: TimeLimits
    new_secret: Callable[[], str]
    moderation: Moderation | None = None
    moderation_bypass: frozenset[str] = frozenset()
    prices: PriceList = PriceList()  # noqa: RUF009  # it is frozen
    anonymous: frozenset[str] = frozenset()
    egress_policy: EgressPolicy = EgressPolicy.ANY
    payments: Payments = NO_PAYMENTS
    bodies: BodyReader = field(default_factory=BodyReader)
    being_paid: set[tuple[str, str]] = field(default_factory=set)
    rounds: list[tuple[str, MembershipProber]] = field(default_factory=list)

    @property
    def models(self) -> Collection[str]:
        """The models of the workers that are there."""
        return self.hub.pool.roster.models

    def moderation_for(self, owner: str) -> Moderation | None:
        """Return what the owner's requests and answers must pass, if anything."""
        return None if owner in self.moderation_bypass else self.moderation
