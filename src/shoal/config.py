"""Every setting and its default, in one place: flag over variable over file."""

import math
import os
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

import platformdirs

from shoal.domain.errors import ConfigError

T = TypeVar("T")

ENVIRONMENT = "SHOAL_"


USER_DATA = platformdirs.user_data_path("shoal", appauthor=False)
USER_FILE = platformdirs.user_config_path("shoal", appauthor=False) / "shoal.toml"


def setting(help: str, default: object, metavar: str = "") -> Any:
    """Declare a field of a configuration, with the texts its flag shows.

    Without a ``metavar`` its value is called by the last word of its name.
    """
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What ``shoal serve`` is told."""

    host: str = setting("the address to listen on", "127.0.0.1")
    port: int = setting("the port to listen on; 0 lets the system choose", 4010)
    data_dir: Path = setting("where jobs and keys are kept", USER_DATA)
    api_key: str = setting("a first API key, instead of a made one", "")
    join_token: str | None = setting(
        "what workers present, instead of a made one; empty: none is asked for", None
    )
    tls_cert: Path | None = setting(
        "the certificate to serve HTTPS with, in PEM form, followed by those that lead "
        "to its authority",
        None,
        "FILE",
    )
    tls_key: Path | None = setting("its private key, in PEM form", None, "FILE")
    open_loopback: bool = setting(
        "let programs of this machine ask without a key; web pages are kept out", False
    )
    queue_max: int = setting("jobs that may wait; more are refused", 1000, "JOBS")
    queue_wait: float = setting("seconds a job may wait for a worker", 30.0, "SECONDS")
    hedge_after: float = setting(
        "seconds without a word from a worker until a second one, if one is idle, gets "
        "the job as well; 0: never",
        0.0,
        "SECONDS",
    )
    moderation: Path | None = setting(
        "a file of regular expressions that questions and answers must not match",
        None,
        "FILE",
    )
    keep_days: float = setting("days that ended jobs are kept", 7.0)
    price_fast_inference: str = setting(
        "what a chat or a completion costs", "$0.010", "DOLLARS"
    )
    price_fast_task: str = setting(
        "what a task or an embedding costs with the policy FAST", "$0.003", "DOLLARS"
    )
    price_cheap_inference: str = setting(
        "what a chat or a completion costs with the policy CHEAP", "$0.005", "DOLLARS"
    )
    price_cheap_task: str = setting(
        "what a task or an embedding costs otherwise", "$0.001", "DOLLARS"
    )
    fee: float = setting("what the pool keeps of each price", 5.0, "PERCENT")
    spot_checks: float = setting(
        "the share of deterministic jobs, from 0 to 1, that other workers do as well, "
        "to compare",
        0.0,
        "SHARE",
    )
    webhooks: str = setting(
        "which addresses may be told of the end of jobs: public, any or off", "public"
    )
    drain: float = setting(
        "seconds that open jobs get to end when stopping", 30.0, "SECONDS"
    )


@dataclass(frozen=True, slots=True)
class X402Config:
    """How jobs over HTTP are paid for, if they are to be."""

    facilitator: str = setting(
        "the x402 facilitator that checks and settles payments of jobs; empty: nothing "
        "is to be paid",
        "",
        "URL",
    )
    pay_to: str = setting("the address that payments go to", "", "ADDRESS")
    network: str = setting(
        "the chain, by its CAIP-2 name, such as eip155:8453", "", "CHAIN"
    )
    asset: str = setting("the token to be paid in, worth a dollar", "", "ADDRESS")
    decimals: int = setting("the token's decimals", 6, "N")
    name: str = setting("the name of the token's EIP-712 domain, on EVM chains", "")
    version: str = setting("its version", "")


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """What ``shoal join`` is told, besides where to."""

    wire: str = setting(
        "the coordinator's protocol; auto: by its URL and by what answers there", "auto"
    )
    engine: tuple[str, ...] = setting(
        "what runs models: auto (the servers found on this machine, or else embedded), "
        "embedded, or an OpenAI-compatible server's URL; may be given several times",
        (),
    )
    name: str = setting("the worker's name (default: the host's)", "")
    slots: int = setting("jobs at a time of each engine; 0: what it does well", 0, "N")
    token: str = setting("what the coordinator asks workers for", "")
    only_for: tuple[str, ...] = setting(
        "names of the keys to work for, with commas between; none: all", (), "KEYS"
    )
    engine_key: str = setting("the API key of the servers that --engine names", "")
    context: int = setting(
        "tokens of a chat, question and answer, in the embedded engine; 0: 4096 or "
        "what the model was made for",
        0,
        "TOKENS",
    )
    threads: int = setting(
        "the embedded engine's threads; 0: all cores but one", 0, "N"
    )
    provider_type: str = setting(
        "what this machine is, where the wire tells: DESKTOP or SEEKER, a phone",
        "DESKTOP",
    )
    identity: Path | None = setting(
        "the file with the key that the worker is known by, made at first use "
        "(default: one for each name, in the data folder)",
        None,
        "FILE",
    )
    pairing_code: str = setting(
        "a code from a user who trusts this worker with private jobs", "", "CODE"
    )


def load(
    config: type[T],
    section: str,
    flags: Mapping[str, object],
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> T:
    """Put a configuration together from flags, variables, a TOML file and defaults.

    ``flags`` holds what was given on the command line, by field name.  A variable is
    ``SHOAL_`` and the field's name in capitals (``SHOAL_SECTION_TOKEN`` for a
    field of another section than ``serve`` and ``join``); the file has a table for
    each section.

    Raises ConfigError naming the flag, variable or line that is no good.
    """
    table = _section(file, section)
    values: dict[str, Any] = {}
    types = typing.get_type_hints(config)
    for each in fields(config):  # type: ignore[arg-type]  # T is a dataclass
        name = variable(section, each)
        if flags.get(each.name) is not None:
            values[each.name] = _convert(
                flags[each.name], types[each.name], flag(section, each)
            )
        elif name in environment:
            values[each.name] = _convert(environment[name], types[each.name], name)
        elif each.name in table:
            where = f"{file}: [{section}] {each.name}"
            values[each.name] = _convert(table.pop(each.name), types[each.name], where)
    if unknown := sorted(table.keys() - {each.name for each in fields(config)}):  # type: ignore[arg-type]  # T is a dataclass
        raise ConfigError(f"{file}: [{section}] has no setting {unknown[0]}")
    return config(**values)


def check_file(file: Path, sections: Collection[str]) -> None:
    """Raise ConfigError if the file has something that nobody reads."""
    for name, value in _read(file).items():
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: {name} belongs into a table, such as [serve]")
        if name not in sections:
            known = ", ".join(f"[{section}]" for section in sorted(sections))
            raise ConfigError(f"{file}: there is no table [{name}], but {known}")


def check_x402(config: X402Config) -> None:
    """Raise ConfigError if something of what payments need is missing or no good.

    Nothing at all is good: then nobody is asked to pay.
    """
    if config == X402Config():
        return
    needed = ["facilitator", "pay_to", "network", "asset"]
    if config.network.startswith("eip155:"):
        needed += ["name", "version"]  # without, nobody can sign a payment
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    for each in fields(config):
        if each.name in needed and not given[each.name]:
            raise ConfigError(
                f"{flag('x402', each)}: payments need it, together with "
                + ", ".join(
                    flag("x402", other)
                    for other in fields(config)
                    if other.name in needed and other is not each
                )
            )
    url = config.facilitator
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--x402-facilitator {url}: expected http:// or https://")


def flag(section: str, each: "Field[Any]") -> str:
    """Return the flag that sets a field."""
    prefix = "" if section in ("serve", "join") else f"{section}-"
    return f"--{prefix}{each.name.replace('_', '-')}"


def variable(section: str, each: "Field[Any]") -> str:
    """Return the environment variable that sets a field."""
    prefix = "" if section in ("serve", "join") else f"{section.upper()}_"
    return f"{ENVIRONMENT}{prefix}{each.name.upper()}"


def _section(file: Path | None, section: str) -> dict[str, Any]:
    table = _read(file).get(section, {}) if file else {}
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {section} must be a table")
    return table


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError as error:
        if file == USER_FILE:
            return {}
        raise ConfigError(f"--config {file}: there is no such file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _convert(value: object, type_: Any, where: str) -> object:
    """Turn ``value``, which may be text, into what the field wants."""
    if typing.get_origin(type_) in (UnionType, typing.Union):
        (type_,) = (each for each in typing.get_args(type_) if each is not NoneType)
    try:
        if type_ is bool:
            return _boolean(value)
        if type_ is Path:
            return Path(str(value)).expanduser()
        if type_ in (int, float):
            return _number(value, type_)
        if type_ == tuple[str, ...]:
            return _texts(value)
        if type_ is str and isinstance(value, str):
            return value
    except ValueError:
        pass
    wanted = {
        int: "a whole number of 0 or more",
        float: "a number of 0 or more",
        bool: "true or false",
        tuple[str, ...]: "texts",
    }
    raise ConfigError(f"{where}: expected {wanted.get(type_, 'text')}, got {value!r}")


def _number(value: object, type_: type[int] | type[float]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    number = type_(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError
    if isinstance(value, float) and number != value:
        raise ValueError  # half a port
    return number


def _texts(value: object) -> tuple[str, ...]:
    """Return the texts of a list, or between commas."""
    values = value if isinstance(value, list) else [value]
    texts: list[str] = []
    for each in values:
        if not isinstance(each, str):
            raise ValueError
        texts += (part.strip() for part in each.split(","))
    return tuple(text for text in texts if text)


def _boolean(value: object) -> bool:
    match value:
        case bool():
            return value
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off" | "":
            return False
        case _:
            raise ValueError
