"""``shoal config``: the settings in effect, and where they and other files are."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from shoal.app.fleet_files import FILE as FLEET_FILE
from shoal.app.fleet_files import with_fleet
from shoal.cli.log import LOG_FILE
from shoal.cli.options import config_file_option, data_dir_option, json_option
from shoal.cli.terminal import Columns, show, show_table
from shoal.config import JoinConfig, ServeConfig, X402Config, loader
from shoal.engines.gguf_files import model_folders
from shoal.protocols import discover

CONFIGS = {"serve": ServeConfig, "join": JoinConfig} | {
    **{name: protocol.config for name, protocol in discover().items()},
    "x402": X402Config,
}
"""The configuration of each section."""

MASK = "********"
COLUMNS: Columns = {
    "SETTING": lambda each: f"{each.section}.{each.setting.declared.name}",
    "VALUE": lambda each: each.text,
    "FROM": lambda each: each.source,
}


@dataclass(frozen=True, slots=True)
class _Effective:
    section: str
    setting: loader.LoadedSetting
    source: str
    """What people call its source."""

    @property
    def value(self) -> object:
        """The value as JSON has it, without a secret."""
        value = self.setting.value
        if self.setting.declared.metadata.get("secret"):
            return MASK if value else value
        if isinstance(value, Path):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    @property
    def text(self) -> str:
        """The value as a flag, a variable or the file takes it."""
        match self.value:
            case None:
                return ""
            case bool() as value:
                return str(value).lower()
            case list() as values:
                return ",".join(values)
            case value:
                return str(value)


@click.group("config")
def command() -> None:
    """Show the settings in effect, and where they and other files are."""


@command.command("show")
@click.argument("sections", type=click.Choice([*CONFIGS]), nargs=-1)
@click.option(
    "--set",
    "given",
    is_flag=True,
    help="Only settings that differ from their defaults.",
)
@config_file_option
@json_option
def show_settings(
    sections: tuple[str, ...], given: bool, config_file: Path, as_json: bool
) -> None:
    """Show the settings of serve and join, of each protocol, and of payments.

    Each is shown with its source: the default, a variable, or the file.  A flag of
    `shoal serve` or `shoal join` overrides all of them.  Secrets are masked.
    """
    loader.check_file(config_file, CONFIGS.keys())
    found = [
        each
        for section in sections or CONFIGS
        for each in _effective(section, config_file)
        if not given or each.source != loader.SettingSource.DEFAULT.value
    ]
    settings = [_as_json(each) for each in found]
    shown = {"file": str(config_file), "settings": settings}
    nothing = "all settings have their defaults"
    show_table(shown, as_json, COLUMNS, found, nothing)


@command.command("path")
@config_file_option
@data_dir_option
@json_option
def path(config_file: Path, data_dir: Path, as_json: bool) -> None:
    """Print the paths of the settings file, the data, the log and the models.

    `clients` is the folder where commands other than serve look for a coordinator's
    key, if it is not the data folder of serve.
    """
    serve = loader.load(ServeConfig, "serve", {}, config_file)
    paths = {
        "config": [config_file],
        "data": [serve.data_dir],
        "clients": [data_dir] if data_dir != serve.data_dir else [],
        "log": [serve.data_dir / LOG_FILE],
        "models": [each.folder for each in model_folders(serve.data_dir)],
    }
    shown = {name: [str(each) for each in found] for name, found in paths.items()}
    lines = [
        f"{name:8}{each}{'' if each.exists() else '  (does not exist)'}"
        for name, found in paths.items()
        for each in found
    ]
    show(shown, as_json, *lines)


def _effective(section: str, file: Path) -> Iterator[_Effective]:
    """Yield the settings of a section.  Raises ConfigError."""
    config: type[Any] = CONFIGS[section]
    loaded = loader.load_settings(config, section, {}, file)
    paired = _paired(section, file)
    for each in loaded:
        source = each.origin or each.source.value
        if each.declared.name in paired:
            value, source = paired[each.declared.name]
            each = replace(each, value=value)
        yield _Effective(section, each, source)


def _paired(section: str, file: Path) -> dict[str, tuple[object, str]]:
    """Return the settings of a wire that its paired fleet gives, with their source."""
    protocol = discover().get(section)
    if protocol is None:
        return {}
    folder = loader.load(ServeConfig, "serve", {}, file).data_dir
    before = loader.load(protocol.config, section, {}, file)
    after = with_fleet(before, protocol.fleets, folder)
    return {
        each.name: (value, str(folder / FLEET_FILE))
        for each in fields(protocol.config)
        if (value := getattr(after, each.name)) != getattr(before, each.name)
    }


def _as_json(each: _Effective) -> dict[str, object]:
    declared = each.setting.declared
    return {
        "section": each.section,
        "name": declared.name,
        "flag": loader.flag(each.section, declared),
        "variable": loader.variable(each.section, declared),
        "value": each.value,
        "source": each.source,
    }
