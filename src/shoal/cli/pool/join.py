"""``shoal join``: offer this machine's models and functions to a coordinator."""

import ipaddress
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import click

from shoal.app.worker_ports import fleet_wires
from shoal.cli.command_loop import run_loop
from shoal.cli.log import log_options, log_to_stderr
from shoal.cli.options import (
    SettingsCommand,
    config_file_option,
    data_dir_option,
    given,
    setting_options,
    wire_options,
)
from shoal.cli.use.models.pull import resolve_model
from shoal.cli.worker.join_lending import check_lending
from shoal.cli.worker.join_library import LOAD_NONE, LOADS, loads_on_order
from shoal.cli.worker.join_models import token_prices
from shoal.cli.worker.join_target import DEFAULT_PORT, HTTP, listening_target
from shoal.cli.worker.run_worker import DEVICES, JoinArguments, run_worker
from shoal.config import JoinConfig
from shoal.config.loader import check_file, load, read_secret
from shoal.config.schedule import parse_window
from shoal.config.throttle_file import check_throttle
from shoal.domain.addresses import LOOPBACK_NAME, split_addresses
from shoal.domain.errors import ConfigError
from shoal.domain.job import PRIVACY_CLASSES
from shoal.domain.money import dollars, parse_dollars
from shoal.engines.selection import FIELDS, parse_model_option
from shoal.protocols import discover

ANY = "any"
_PORT = re.compile(r":[0-9]+$")


@click.command("join", cls=SettingsCommand)
@click.argument(
    "url",
    default="",
    envvar="SHOAL_URL",
    help="URL of the coordinator: http://HOST:PORT, ws://…, or tcp://HOST:PORT of a "
    "peer; several of one pool, separated by commas: the first that answers is used, "
    "and the next when it is lost.  Default: the coordinator on this machine, else the "
    "one on the local network.  [env var: SHOAL_URL]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME[=PATH]",
    help="Model to offer, with its GGUF file for the embedded engine, or a pattern "
    "such as 'qwen*'; repeatable.  A model of the hub, ORGANIZATION/NAME"
    "[:QUANTIZATION], is downloaded if this machine lacks it.  Default: all models of "
    "the servers, else the largest local file that fits into memory.",
)
@click.option(
    "--engine-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the API key of the servers named by --engine.  [env var: "
    "SHOAL_ENGINE_KEY_FILE]",
)
@click.option("--yes", is_flag=True, help="Download models without asking.")
@setting_options(JoinConfig, "join", "this worker")
@wire_options(fleet_wires())
@data_dir_option
@config_file_option
@log_options("warning")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def command(
    url: str,
    models: tuple[str, ...],
    engine_key_file: Path | None,
    yes: bool,
    data_dir: Path,
    config_file: Path,
    log_level: str,
    log_format: str,
    as_json: bool,
    **values: object,
) -> int:
    """Offer this machine's models and functions to a coordinator."""
    log_to_stderr(log_level, log_format)
    check_file(config_file, {"serve", "join", "x402", *discover()})
    flags = given(values, JoinConfig, "join")
    if engine_key_file is not None:
        flags["engine_key"] = read_secret("--engine-key-file", engine_key_file)
    config = check_config(load(JoinConfig, "join", flags, config_file))
    for each in models:
        parse_model_option(each)
    if not config.engine:  # else they are names at those servers
        models = tuple(resolve_model(each, data_dir, yes=yes) for each in models)
    fleets = {
        name: given(values, protocol.config, name)
        for name, protocol in fleet_wires().items()
    }
    arguments = JoinArguments(
        ",".join(normalize_url(each, config.wire) for each in split_addresses(url)),
        models,
        config,
        data_dir,
        listening_target(
            *(url, config, fleets, config_file, data_dir),
            with_models=bool(config.engine or models or loads_on_order(config))
            or not (config.tasks or config.trust_code),
        ),
        as_json,
    )
    return run_loop(partial(run_worker, arguments))


def check_config(config: JoinConfig) -> JoinConfig:
    """Return a configuration with its values in their normal form.

    Raises ConfigError for an invalid one: before a model is loaded.
    """
    if config.provider_type not in DEVICES:
        known = " or ".join(DEVICES)
        raise ConfigError(f"--provider-type {config.provider_type}: expected {known}")
    if config.fields not in FIELDS:
        known = " or ".join(FIELDS)
        raise ConfigError(f"--fields {config.fields}: expected {known}")
    if config.load not in LOADS:
        known = ", ".join(LOADS[1:])
        raise ConfigError(f"--load {config.load}: expected one of {known}")
    for gpu in config.gpus:
        if not gpu.isdecimal():
            raise ConfigError(f"--gpus {gpu}: expected the number of a GPU, such as 0")
    check_lending(config)
    if config.throttle is not None:
        check_throttle(config.throttle)
    for window in config.schedule:
        parse_window(window)
    prices = token_prices(config)
    if config.last_resort and prices is None:
        raise ConfigError(
            "--last-resort: name what the provider takes for a million tokens read and "
            "written, such as --price-per-million 0.15,0.60"
        )
    if config.last_resort and not config.engine:
        raise ConfigError("--last-resort: name the provider with --engine URL")
    if prices is not None and not config.last_resort:
        raise ConfigError("--price-per-million is for --last-resort only")
    if config.last_resort and loads_on_order(config):
        raise ConfigError(
            f"--load {config.load}: a worker of last resort loads no models; offer "
            "them by another `shoal join`"
        )
    return replace(
        config,
        privacy=parse_privacy(config.privacy),
        price=_price(config.price),
        load=LOAD_NONE if config.last_resort else config.load,
    )


def normalize_url(url: str, wire: str) -> str:
    """Return the URL of a coordinator that is named in short, if no wire is given.

    HOST:PORT gets a scheme, and ``localhost`` or an address the default port, too.

    Raises ConfigError for an invalid URL.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is invalid
        if parts.scheme in HTTP and not parts.hostname:
            raise ValueError("no host")
    except ValueError as error:
        shown = url.partition("?")[0]
        raise ConfigError(f"{shown}: {error}; expected http://HOST:PORT") from error
    if wire != "auto" or "://" in url:
        return url
    if (host := _bare_host(url)) is not None:
        return f"http://{host}:{DEFAULT_PORT}"
    return f"http://{url}" if _PORT.search(url) else url


def _bare_host(url: str) -> str | None:
    """Return ``localhost`` or an IP address as in a URL; None for anything else."""
    if url == LOOPBACK_NAME:
        return url
    try:
        address = ipaddress.ip_address(url)
    except ValueError:
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def parse_privacy(given: str) -> str:
    """Return a privacy class in lower case; raises ConfigError for an unknown one."""
    known = [ANY, *PRIVACY_CLASSES]
    if given.lower() not in known:
        *others, last = known
        raise ConfigError(f"--privacy {given}: expected {', '.join(others)} or {last}")
    return given.lower()


def _price(given: str) -> str:
    """Return the price to ask for as it is shown; raises ConfigError if invalid."""
    try:
        return dollars(parse_dollars(given)) if given else ""
    except ConfigError as error:
        raise ConfigError(f"--price: {error}") from error
