"""What every face of the gateway works with."""

from collections.abc import Collection
from dataclasses import dataclass

from shoal.domain.work import Limits
from shoal.gateway.auth import Keyring
from shoal.gateway.moderation import Moderation
from shoal.runtime.clock import Clock
from shoal.runtime.hub import Hub
from shoal.store.port import Store


@dataclass(frozen=True, slots=True)
class Gateway:
    """The coordinator, as the HTTP faces see it.

    ``moderation_bypass`` names the keys whose requests are not moderated.
    """

    hub: Hub
    store: Store
    clock: Clock
    keyring: Keyring
    limits: Limits
    moderation: Moderation | None = None
    moderation_bypass: frozenset[str] = frozenset()

    @property
    def models(self) -> Collection[str]:
        """The models of the workers that are there."""
        return self.hub.pool.with_model.keys()

    def moderation_for(self, owner: str) -> Moderation | None:
        """Return what the owner's requests and answers must pass, if anything."""
        return None if owner in self.moderation_bypass else self.moderation
