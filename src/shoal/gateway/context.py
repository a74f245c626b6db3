"""The coordinator, as the HTTP server has it, and its parts for handlers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import TypeAlias, TypeVar

from shoal.batches.client_files import ClientFiles
from shoal.batches.runner import BatchRunner
from shoal.calls.durable import DurableCalls
from shoal.coordinator.admission import WorkerAdmission
from shoal.coordinator.hub import Hub
from shoal.domain.job import TimeLimits
from shoal.domain.moderation import Moderation
from shoal.gateway.chat.inputs import TokenTexts
from shoal.gateway.http.access import Access
from shoal.gateway.http.body import BodyReader
from shoal.gateway.http.proxies import TrustedProxies
from shoal.gateway.http.web_origins import PagePolicy
from shoal.gateway.job_service import JobService
from shoal.gateway.jobs.payments import NO_PAYMENTS, Payments
from shoal.gateway.jobs.webhooks import EgressPolicy, WebhookResults
from shoal.ledger.accounts import PriceList
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.peers.peer_directory import PeerDirectory
from shoal.pool.models.machine import PlacementRules
from shoal.pool.models.placement import DEFAULT_RULES
from shoal.protocols.seam.endpoints import MembershipProber
from shoal.protocols.seam.relay import RelayMachine
from shoal.store.port import Store
from shoal.store.signing_keys import SigningKeys
from shoal.transports.clock import Clock
from shoal.transports.spans import SpanSink

Parts = TypeVar("Parts")
ModerationOf: TypeAlias = Callable[[str], Moderation | None]
"""Returns the moderation of an owner's requests and answers, if any."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The coordinator, as the HTTP server has it.

    A handler gets the parts of it that the fields of its parameter's type name, such as
    ``JobsGateway``.
    """

    hub: Hub
    calls: DurableCalls
    store: Store
    clock: Clock
    access: Access
    admission: WorkerAdmission
    limits: TimeLimits
    files: ClientFiles  # that clients upload
    batches: BatchRunner  # runs the requests in files
    new_secret: Callable[[], str]  # the random part of keys and tokens
    signing: SigningKeys  # of the log of receipts
    moderation: Moderation | None = None
    moderation_bypass: frozenset[str] = frozenset()  # keys that are not moderated
    prices: PriceList = PriceList()  # noqa: RUF009  # it is frozen
    anonymous: frozenset[str] = frozenset()  # protocols and APIs that need no key
    pages: PagePolicy = PagePolicy()  # noqa: RUF009  # it is frozen
    proxies: TrustedProxies = TrustedProxies()  # noqa: RUF009  # it is frozen
    lists_loadable: bool = True  # whether clients list models that are not loaded
    placement: PlacementRules = DEFAULT_RULES
    egress_policy: EgressPolicy = EgressPolicy.ANY  # limits the addresses of webhooks
    payments: Payments = NO_PAYMENTS
    being_paid: set[tuple[str, str]] = field(default_factory=set)
    """The owner and the idempotency key of each job with a payment in progress."""
    unencrypted: Mapping[str, str] = field(default_factory=dict)
    """By wire: peers of other machines whose connections are not encrypted."""
    bodies: BodyReader = field(default_factory=BodyReader)
    token_texts: TokenTexts = field(default_factory=TokenTexts)
    directory: PeerDirectory = field(default_factory=PeerDirectory)
    sharing: LibraryServer = field(default_factory=lambda: LibraryServer(Library({})))
    probers: list[tuple[str, MembershipProber]] = field(default_factory=list)
    relays: list[tuple[str, RelayMachine]] = field(default_factory=list)
    """The membership probers and the coordinator's relays, each with its protocol."""
    created_at: float = 0.0  # Unix time at which the coordinator was set up
    started_at: float = 0.0  # Unix time
    spans: SpanSink | None = None  # exports traces
    webhook_results: WebhookResults = field(default_factory=WebhookResults)

    @property
    def jobs(self) -> JobService:
        """How jobs are run, read and cancelled."""
        return self.access.jobs

    def moderation_for(self, owner: str) -> Moderation | None:
        """Return the moderation of the owner's requests and answers, if any."""
        return None if owner in self.moderation_bypass else self.moderation

    def select(self, kind: type[Parts]) -> Parts:
        """Return the parts that the fields of a dataclass name."""
        names = signature(kind).parameters
        return kind(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, slots=True)
class JobsGateway:
    """For handlers that run jobs of any dialect, and show them.

    It has no hub, which may be in another process.
    """

    store: Store
    access: Access
    bodies: BodyReader
    clock: Clock
    limits: TimeLimits
    prices: PriceList
    moderation_for: ModerationOf
    token_texts: TokenTexts

    @property
    def jobs(self) -> JobService:
        """How jobs are run, read and cancelled."""
        return self.access.jobs


@dataclass(frozen=True, slots=True)
class ChatGateway(JobsGateway):
    """For handlers of dialects that also show models."""

    hub: Hub
    created_at: float
    lists_loadable: bool


@dataclass(frozen=True, slots=True)
class PaidJobsGateway(JobsGateway):
    """For handlers of jobs that may be paid for, and of pairings with providers."""

    hub: Hub
    payments: Payments
    being_paid: set[tuple[str, str]]
    egress_policy: EgressPolicy
    new_secret: Callable[[], str]


@dataclass(frozen=True, slots=True)
class BatchesGateway:
    """For handlers of batches, and of clients' files."""

    store: Store
    clock: Clock
    access: Access
    bodies: BodyReader
    files: ClientFiles
    batches: BatchRunner


@dataclass(frozen=True, slots=True)
class CallsGateway:
    """For handlers of function calls, and of their values."""

    hub: Hub
    calls: DurableCalls
    clock: Clock
    access: Access
    bodies: BodyReader
    prices: PriceList
    pages: PagePolicy


@dataclass(frozen=True, slots=True)
class RunsGateway:
    """For handlers of training runs."""

    hub: Hub
    store: Store
    bodies: BodyReader
    pages: PagePolicy


@dataclass(frozen=True, slots=True)
class ModelsGateway:
    """For handlers of models, their aliases, deployments and copies."""

    hub: Hub
    clock: Clock
    directory: PeerDirectory
    sharing: LibraryServer
    created_at: float
    lists_loadable: bool
    placement: PlacementRules
    pages: PagePolicy


@dataclass(frozen=True, slots=True)
class ReceiptsGateway:
    """For handlers of receipts, and of their log."""

    hub: Hub
    store: Store
    signing: SigningKeys


@dataclass(frozen=True, slots=True)
class AccountsGateway:
    """For handlers of keys, tokens, sessions, usage and balances."""

    hub: Hub
    store: Store
    clock: Clock
    access: Access
    admission: WorkerAdmission
    bodies: BodyReader
    directory: PeerDirectory
    new_secret: Callable[[], str]
    created_at: float


@dataclass(frozen=True, slots=True)
class OperatorsGateway:
    """For handlers of operators, who see the pool and all jobs."""

    hub: Hub
    jobs: JobService
    store: Store
    clock: Clock
    access: Access
    directory: PeerDirectory
    probers: list[tuple[str, MembershipProber]]
    relays: list[tuple[str, RelayMachine]]
    unencrypted: Mapping[str, str]
    started_at: float


@dataclass(frozen=True, slots=True)
class HealthGateway:
    """For handlers that tell anyone whether the coordinator works."""

    hub: Hub
    admission: WorkerAdmission
