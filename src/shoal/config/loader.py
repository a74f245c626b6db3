"""Declares and loads settings: flag over variable over file over default."""

import logging
import math
import os
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

import platformdirs

from shoal.config.private_files import readable_by_others
from shoal.domain.errors import ConfigError
from shoal.domain.secret_strength import why_guessable

T = TypeVar("T")

log = logging.getLogger("shoal.config")

ENVIRONMENT = "SHOAL_"  # prefix of variables
USER_FILE = platformdirs.user_config_path("shoal", appauthor=False) / "shoal.toml"


def setting(
    help: str, default: object, metavar: str = "", *, secret: bool = False
) -> Any:
    """Declare a field of a configuration, with the help text of its flag.

    The default ``metavar`` is the last word of the field's name.  A ``secret`` admits
    whoever presents it, see ``check_secrets``, and should be readable only to its user.
    """
    metadata = {"help": help, "metavar": metavar, "secret": secret}
    return field(default=default, metadata=metadata)


def load(
    config: type[T],
    section: str,
    flags: Mapping[str, object],
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> T:
    """Load a configuration from flags, variables, a TOML file and defaults.

    ``flags`` holds the command line's values by field name.  A variable is
    ``SHOAL_`` and the field's name in capitals (``SHOAL_SECTION_TOKEN`` for a
    field of another section than ``serve`` and ``join``); the file has a table for
    each section.

    Raises ConfigError naming the invalid flag, variable or line.
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
            if each.metadata.get("secret"):
                _warn_if_readable(file)
    if unknown := sorted(table.keys() - {each.name for each in fields(config)}):  # type: ignore[arg-type]  # T is a dataclass
        raise ConfigError(f"{file}: [{section}]: unknown setting {unknown[0]}")
    return config(**values)


def check_file(file: Path, sections: Collection[str]) -> None:
    """Raise ConfigError if the file has a table that no command reads."""
    for name, value in _read(file).items():
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: {name} must be in a table, such as [serve]")
        if name not in sections:
            known = ", ".join(f"[{section}]" for section in sorted(sections))
            raise ConfigError(f"{file}: unknown table [{name}]; expected {known}")


def flag(section: str, each: "Field[Any]") -> str:
    """Return the flag that sets a field."""
    prefix = "" if section in ("serve", "join") else f"{section}-"
    return f"--{prefix}{each.name.replace('_', '-')}"


def check_secrets(section: str, config: object) -> None:
    """Raise ConfigError if a secret of a configuration can be guessed.

    Empty secrets mean that none is asked for.  Only for configurations of what other
    machines can reach.
    """
    for each in fields(config):  # type: ignore[arg-type]  # it is a dataclass
        if each.metadata.get("secret") and (given := getattr(config, each.name)):
            check_secret(flag(section, each), given)


def check_secret(name: str, secret: str) -> None:
    """Raise ConfigError with a hint if a secret can be guessed; ``name`` is shown."""
    if (reason := why_guessable(secret)) is not None:
        raise ConfigError(
            f"{name}: other machines could guess this secret: {reason}. Use a random "
            "one, such as from `openssl rand -hex 16`; or listen on 127.0.0.1, where "
            "any secret is accepted"
        )


def variable(section: str, each: "Field[Any]") -> str:
    """Return the environment variable that sets a field."""
    prefix = "" if section in ("serve", "join") else f"{section.upper()}_"
    return f"{ENVIRONMENT}{prefix}{each.name.upper()}"


def _warn_if_readable(file: Path | None) -> None:
    if file is not None and readable_by_others(file):
        log.warning("%s holds secrets, and other users can read it: chmod 600", file)


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
        raise ConfigError(f"--config {file}: no such file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _convert(value: object, type_: Any, where: str) -> object:
    """Convert ``value``, which may be text, to the type of its field."""
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
        tuple[str, ...]: "a list of texts",
    }
    raise ConfigError(f"{where}: expected {wanted.get(type_, 'text')}, got {value!r}")


def _number(value: object, type_: type[int] | type[float]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    number = type_(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError
    if isinstance(value, float) and number != value:
        raise ValueError  # a fraction, for an integer
    return number


def _texts(value: object) -> tuple[str, ...]:
    """Return the items of a list or of a comma-separated text."""
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
