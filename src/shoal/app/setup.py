"""What a coordinator knows before it opens anything: settings, certificate, secrets."""

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.app.database import check_store, shared_secrets
from shoal.app.fleet_files import with_fleets
from shoal.app.https import Https, open_https
from shoal.app.node import Node
from shoal.app.parts import HubPart
from shoal.app.settings import CoordinatorSettings, read_settings
from shoal.config import ServeConfig, X402Config, check_x402, secret_files
from shoal.config.loader import check_secret, check_secrets
from shoal.config.private_files import make_private_folder
from shoal.domain.addresses import is_own_host
from shoal.domain.errors import ConfigError
from shoal.transports.clock import LoopClock

if TYPE_CHECKING:
    from shoal.app.node_secrets import NodeSecrets

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class Setup:
    """What the parts of a coordinator are opened from.

    ``wires``, ``x402``, ``part`` and ``node`` are as in ``run_coordinator``;
    ``shared`` are the secrets that a database on a server has, too.
    """

    config: ServeConfig
    wires: Mapping[str, object]
    x402: X402Config
    part: HubPart | None
    node: Node | None
    settings: CoordinatorSettings
    clock: LoopClock
    shared: "NodeSecrets | None"
    https: Https | None
    api_key: str
    token: str
    """Admits workers; empty: any may join."""

    @property
    def name(self) -> str:
        """The coordinator's name, for people and peers."""
        return self.config.name or socket.gethostname() or "shoal"


async def read_setup(
    config: ServeConfig,
    wires: Mapping[str, object],
    x402: X402Config,
    part: HubPart | None,
    node: Node | None,
) -> Setup:
    """Check all settings, and read or make the secrets.

    Raises ConfigError, StoreError.
    """
    settings = read_settings(config)
    check_x402(x402)
    clock = LoopClock()
    check_store(config.store)
    shared = shared_secrets(config)
    if shared is not None:
        await asyncio.to_thread(shared.fetch)
    wires = with_fleets(wires, config.data_dir)
    if not is_own_host(config.host):
        check_secrets("serve", config)
        for wire, wire_config in wires.items():
            check_secrets(wire, wire_config)
    https = open_https(config, settings.pages.hosts, clock.wall())
    api_key, token = _secrets(config, https)
    given = config, wires, x402, part, node
    return Setup(*given, settings, clock, shared, https, api_key, token)


def _secrets(config: ServeConfig, https: Https | None) -> tuple[str, str]:
    """Return the API key and join token in the folder, made at first use.

    Raises ConfigError.
    """
    folder = config.data_dir
    try:
        make_private_folder(folder)
        api_key = secret_files.first_key(folder, config.api_key)
        token = secret_files.first_token(folder, config.join_token)
        secret_files.store_certificate(
            folder, None if https is None else https.certificate
        )
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    if not is_own_host(config.host):
        # They may be older than the address: stored while only this machine could
        # present them.
        check_secret(f"{folder / secret_files.KEY_FILE} (--api-key)", api_key)
        if token:
            check_secret(f"{folder / secret_files.TOKEN_FILE} (--join-token)", token)
        else:
            log.warning(
                "any machine that reaches this one can join: --join-token is empty"
            )
    return api_key, token
