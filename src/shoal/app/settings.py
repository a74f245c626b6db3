"""Validates the coordinator's configuration and turns it into typed settings."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.config import ServeConfig, X402Config
from shoal.config.installation import install_extra
from shoal.domain.addresses import host_and_port
from shoal.domain.credentials import DAY
from shoal.domain.errors import ConfigError, PaymentsDown
from shoal.domain.job import TimeLimits
from shoal.domain.moderation import Moderation
from shoal.domain.money import Micros, parse_dollars
from shoal.engines.gguf_files import model_folders
from shoal.gateway.http.proxies import TrustedProxies, trusted_proxies
from shoal.gateway.http.web_origins import PagePolicy, page_policy
from shoal.gateway.jobs.payments import NO_PAYMENTS, Payments
from shoal.gateway.jobs.webhooks import EgressPolicy
from shoal.ledger.accounts import BASIS_POINTS, FREE, PriceList
from shoal.models.library import Library, open_library
from shoal.pool.models.machine import MachineKind, PlacementRules
from shoal.protocols.seam.peer_addresses import PeerAddress

NO_X402 = X402Config()

WORKER_WAIT = 30.0  # seconds that a job waits while no worker could take it

log = logging.getLogger("shoal.app")


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """A coordinator's settings, as its parts take them.

    ``fee`` is the pool's share of a price in basis points, ``spot_checks`` that of the
    jobs that are done twice, from 0 to 1.  ``blobs_max``, ``file_max`` and
    ``files_max`` are in bytes, ``kept`` is in seconds.
    """

    limits: TimeLimits
    moderation: Moderation | None
    prices: PriceList
    fee: int
    spot_checks: float
    lists_loadable: bool
    placement: PlacementRules
    reach: EgressPolicy
    library: Library
    contacts: tuple[PeerAddress, ...]
    blobs_max: int
    file_max: int
    files_max: int
    kept: float
    pages: PagePolicy
    proxies: TrustedProxies


def read_settings(config: ServeConfig) -> CoordinatorSettings:
    """Return typed settings.  Raises ConfigError that names an invalid one."""
    return CoordinatorSettings(
        TimeLimits(queue=config.queue_wait, without_worker=WORKER_WAIT),
        _moderation(config.moderation),
        PriceList(
            _price("--price-fast-inference", config.price_fast_inference),
            _price("--price-fast-task", config.price_fast_task),
            _price("--price-cheap-inference", config.price_cheap_inference),
            _price("--price-cheap-task", config.price_cheap_task),
            _price("--price-call", config.price_call),
        ),
        _fee(config.fee),
        _share(config.spot_checks),
        _lists_loadable(config.list_models),
        PlacementRules(preference=_preference(config.prefer)),
        _reach(config.webhooks),
        open_library(
            [_shared(each) for each in config.share],
            [each.folder for each in model_folders(config.data_dir)],
        ),
        tuple(_contact(each) for each in config.peer),
        _size("--blobs-max", config.blobs_max, "gigabytes", 1e9),
        _size("--file-max", config.file_max, "megabytes", 1e6),
        _size("--files-max", config.files_max, "gigabytes", 1e9),
        _above_zero("--keep-days", config.keep_days, "days") * DAY,
        page_policy(config.host, config.allowed_host, config.allowed_origin),
        trusted_proxies(config.trusted_proxy),
    )


@asynccontextmanager
async def open_payments(
    config: X402Config, prices: PriceList
) -> AsyncIterator[Payments]:
    """Collect payments for the length of the block, if that is wanted.

    An unreachable facilitator is logged, and tried again with each job.

    Raises ConfigError if one is wanted that cannot collect them, or if no job that is
    paid for has a price.
    """
    if config == NO_X402:
        yield NO_PAYMENTS
        return
    if replace(prices, call=FREE) == PriceList():  # calls are not paid for by x402
        raise ConfigError(
            "--x402-facilitator: all jobs are free, so there is nothing to pay for: "
            "set their prices with --price-fast-inference, --price-fast-task, "
            "--price-cheap-inference and --price-cheap-task, such as 0.01"
        )
    try:
        from shoal.gateway.jobs.x402 import Seller, X402Payments
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--x402-facilitator: payments need the package {error.name}, which is not "
            f"installed: {install_extra('x402')}"
        ) from error
    domain = {"name": config.name, "version": config.version} if config.name else {}
    payments = X402Payments(
        Seller(
            config.facilitator,
            config.pay_to,
            config.network,
            config.asset,
            config.decimals,
            domain,
        )
    )
    try:
        try:
            await payments.prepare()
        except PaymentsDown as error:
            log.warning("payments do not work yet, so no jobs are accepted: %s", error)
        yield payments
    finally:
        await payments.close()


# Private parts, in the order in which they are called.


def _moderation(file: Path | None) -> Moderation | None:
    if file is None:
        return None
    try:
        return Moderation(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--moderation {file}: {error}") from error


def _price(flag: str, text: str) -> Micros:
    try:
        return parse_dollars(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _fee(percent: float) -> int:
    """Return the pool's share in basis points."""
    share = round(percent * 100)
    if not 0 <= share <= BASIS_POINTS:
        raise ConfigError(f"--fee {percent:g}: expected percent, from 0 to 100")
    return share


def _share(share: float) -> float:
    if not 0 <= share <= 1:
        raise ConfigError(f"--spot-checks {share:g}: expected a share from 0 to 1")
    return share


def _shared(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(
            f"--share {text}: expected NAME=PATH, a GGUF file or a folder"
        )
    return name, Path(path).expanduser()


def _size(flag: str, given: float, units: str, unit: float) -> int:
    """Return a limit in bytes."""
    return round(_above_zero(flag, given, units) * unit)


def _above_zero(flag: str, given: float, units: str) -> float:
    if not given > 0:
        raise ConfigError(f"{flag} {given:g}: expected {units}, above 0")
    return given


def _contact(address: str) -> PeerAddress:
    found = host_and_port(address)
    if found is None or not found[1]:
        raise ConfigError(f"--peer {address!a}: expected HOST:PORT")
    return PeerAddress(address)


def _lists_loadable(word: str) -> bool:
    if word not in ("all", "loaded"):
        raise ConfigError(f"--list-models {word}: expected all or loaded")
    return word == "all"


def _preference(words: str) -> tuple[MachineKind, ...]:
    """Return the kinds of machines, the preferred one first."""
    try:
        kinds = [MachineKind(each.strip()) for each in words.split(",") if words]
    except ValueError:
        kinds = []
    if len({*kinds}) < len(kinds) or bool(words) != bool(kinds):
        known = ", ".join(each.value for each in MachineKind)
        raise ConfigError(f"--prefer {words}: expected some of {known}, each once")
    return tuple(kinds)


def _reach(name: str) -> EgressPolicy:
    try:
        return EgressPolicy(name)
    except ValueError:
        expected = " or ".join(each.value for each in EgressPolicy)
        raise ConfigError(f"--webhooks {name}: expected {expected}") from None
