"""Declares and loads settings: flag over variable over file over default."""

import logging
import math
import os
import re
import tomllib
import typing
from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

import platformdirs

from shoal.config.private_files import readable_by_others
from shoal.domain.errors import ConfigError
from shoal.domain.settings import why_guessable

T = TypeVar("T")

log = logging.getLogger("shoal.config")

Size = typing.NewType("Size", int)
"""Bytes of memory or disk; a user may write a unit."""

GB = 1_000_000_000
_UNITS = {"M": 10**6, "": GB, "G": GB, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[GMT]B?)", re.ASCII | re.IGNORECASE)

ENVIRONMENT = "SHOAL_"  # prefix of variables
SECRET_FILE = "_FILE"  # suffix of those that name the file of a secret
SECRET_MAX = 64 << 10  # bytes of such a file
USER_FILE = platformdirs.user_config_path("shoal", appauthor=False) / "shoal.toml"


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
    each section.  For a secret, a variable that ends with ``_FILE`` names a file with
    the value, as container engines mount secrets.

    Raises ConfigError naming the invalid flag, variable or line.
    """
    found = load_settings(config, section, flags, file, environment)
    return config(
        **{
            each.declared.name: each.value
            for each in found
            if each.source is not SettingSource.DEFAULT
        }
    )


class SettingSource(Enum):
    """Where the value of a setting comes from."""

    FLAG = "flag"
    VARIABLE = "variable"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LoadedSetting:
    """The value of a setting, and its source; ``origin`` names the source for people.

    A default has no origin.
    """

    declared: "Field[Any]"
    value: object
    source: SettingSource
    origin: str = ""


def load_settings(
    config: type[Any],
    section: str,
    flags: Mapping[str, object],
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[LoadedSetting]:
    """Return each setting of a configuration, as ``load`` takes it.

    Raises ConfigError as ``load`` does, except for that of the configuration itself.
    """
    table = _section(file, section)
    types = typing.get_type_hints(config)
    found = [
        _load_field(section, each, types[each.name], table, flags, file, environment)
        for each in fields(config)
    ]
    if unknown := sorted(table.keys() - {each.name for each in fields(config)}):
        raise ConfigError(f"{file}: [{section}]: unknown setting {unknown[0]}")
    return found


def load_setting(
    config: type[Any], section: str, name: str, file: Path | None = None
) -> LoadedSetting:
    """Return one setting, whatever the others are.

    Raises ConfigError if it is invalid, or the file is no TOML.
    """
    (declared,) = (each for each in fields(config) if each.name == name)
    table = _section(file, section)
    hint = typing.get_type_hints(config)[name]
    return _load_field(section, declared, hint, table, {}, file, os.environ)


def check_file(file: Path, sections: Collection[str]) -> None:
    """Raise ConfigError if the file has a table that no command reads."""
    for name, value in _read(file).items():
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: {name} must be in a table, such as [serve]")
        if name not in sections:
            known = ", ".join(f"[{section}]" for section in sorted(sections))
            raise ConfigError(f"{file}: unknown table [{name}]; expected {known}")


def _load_field(
    section: str,
    declared: "Field[Any]",
    hint: Any,
    table: Mapping[str, object],
    flags: Mapping[str, object],
    file: Path | None,
    environment: Mapping[str, str],
) -> LoadedSetting:
    """Return a setting of the type ``hint``; ``table`` is the section in the file.

    Raises ConfigError.
    """
    name, secret = declared.name, declared.metadata.get("secret")
    named = variable(section, declared)
    source, origin, value = SettingSource.DEFAULT, "", declared.default
    if flags.get(name) is not None:
        source, origin = SettingSource.FLAG, flag(section, declared)
        value = _convert(flags[name], hint, origin)
    elif named in environment:
        source, origin = SettingSource.VARIABLE, named
        value = _convert(environment[named], hint, origin)
    elif secret and named + SECRET_FILE in environment:
        source, origin = SettingSource.VARIABLE, named + SECRET_FILE
        value = read_secret(origin, Path(environment[origin]))
    elif name in table:
        source, origin = SettingSource.FILE, f"{file}: [{section}] {name}"
        value = _convert(_unquoted(table[name], hint, origin), hint, origin)
        if secret:
            _warn_if_readable(file)
    return LoadedSetting(declared, value, source, origin)


def flag(section: str, each: "Field[Any]") -> str:
    """Return the flag that sets a field."""
    prefix = "" if section in ("serve", "join") else f"{section}-"
    return f"--{prefix}{each.name.replace('_', '-')}"


def metavar(each: "Field[Any]") -> str:
    """Return what follows a flag: its unit or form, else the name's last word."""
    return each.metadata.get("metavar") or each.name.split("_")[-1].upper()


def check_secrets(section: str, config: object) -> None:
    """Raise ConfigError if a bearer secret of a configuration can be guessed.

    Empty secrets mean that none is asked for.  Only for configurations of what other
    machines can reach.
    """
    for each in fields(config):  # type: ignore[arg-type]  # it is a dataclass
        if each.metadata.get("bearer") and (given := getattr(config, each.name)):
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


def read_secret(name: str, file: Path) -> str:
    """Return the secret in a file that a variable names.  Raises ConfigError."""
    try:
        with open(file, encoding="utf-8") as opened:
            secret = opened.read(SECRET_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}={file}: {error}") from error
    if not secret:  # some of them admit anyone if they are empty
        raise ConfigError(f"{name}={file}: the file is empty")
    return secret


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
        if type_ is Size:
            return _size(value)
        if type_ == tuple[str, ...]:
            return _texts(value)
        if type_ is str and isinstance(value, str):
            return value
    except (ValueError, OverflowError):  # int() of an infinite number
        pass
    wanted = {
        int: "a whole number of 0 or more",
        float: "a number of 0 or more",
        Size: "a size, such as 12GB, 500MB or 12 (GB)",
        bool: "true or false",
        tuple[str, ...]: "a list of strings",
    }
    raise ConfigError(f"{where}: expected {wanted.get(type_, 'text')}, got {value!r}")


def _unquoted(value: object, type_: Any, where: str) -> object:
    """Return a value of a file.  Raises ConfigError for text as a truth value."""
    if type_ is bool and not isinstance(value, bool):
        # TOML has them, so that text is a mistake, and "" would count as false.
        raise ConfigError(
            f"{where}: expected true or false, without quotes, got {value!r}"
        )
    return value


def _number(value: object, type_: type[int] | type[float]) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    number = type_(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError
    if isinstance(value, float) and number != value:
        raise ValueError  # a fraction, for an integer
    return number


def _size(value: object) -> Size:
    """Return the bytes of a size, which is in GB unless its text has a unit."""
    if not isinstance(value, str):
        return Size(int(_number(value, float) * GB))
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise ValueError
    return Size(int(float(found[1]) * _UNITS[found[2][:1].upper()]))


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
