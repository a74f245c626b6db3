"""The dependencies of every HTTP handler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
from shoal.protocols.seam.endpoints import MembershipProber
from shoal.protocols.seam.relay import RelayMachine
from shoal.store.port import Store
from shoal.store.signing_keys import SigningKeys
from shoal.transports.clock import Clock
from shoal.transports.spans import SpanSink


@dataclass(frozen=True, slots=True)
class Gateway:
    """The coordinator, as HTTP handlers see it."""

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
