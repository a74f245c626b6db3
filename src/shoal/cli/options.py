"""Parts of the commands: options of settings, of a coordinator, and what many share.

Each setting is declared once, in a configuration, and its option derived from that.
"""

import functools
import re
import signal
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shoal.cli.terminal import printable
from shoal.config import USER_DATA, data_folder
from shoal.config.loader import USER_FILE, flag, metavar, variable
from shoal.config.runtime_file import DEFAULT_ADDRESS
from shoal.domain.errors import ConfigError

if TYPE_CHECKING:
    from shoal.protocols.seam.protocol import AnyWireProtocol

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=data_folder,
    show_default=f"data_dir of the settings file, else {USER_DATA}",
    envvar="SHOAL_DATA_DIR",
    show_envvar=True,
    metavar="DIR",
    help="Data folder of the coordinator on this machine.",
)

config_file_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    default=USER_FILE,
    show_default=True,
    metavar="FILE",
    help="TOML file with a table for each group of settings.",
)

yes_option = click.option(
    "--yes",
    is_flag=True,
    help="Do not ask for confirmation; without a terminal, nothing is asked.",
)


def pass_api(function: F) -> F:
    """Add the options of a coordinator; the command's first argument is its API."""

    @functools.wraps(function)
    def call(
        *args: Any,
        url: str | None,
        api_key: str | None,
        data_dir: Path,
        cacert: Path | None,
        **kwargs: Any,
    ) -> Any:
        from shoal.client.coordinator import CoordinatorApi  # others start without

        def on_wait(text: str) -> None:
            click.echo(printable(text), err=True)

        api = CoordinatorApi(url, api_key, data_dir, cacert, on_wait)
        _interrupt_at_end()
        return function(api, *args, **kwargs)

    for option in (
        click.option(
            "--cacert",
            type=click.Path(path_type=Path),
            envvar="SHOAL_CACERT",
            show_envvar=True,
            metavar="FILE",
            help="PEM file with trusted certificate authorities.  Default: the "
            "system's; for the coordinator on this machine, its own.",
        ),
        data_dir_option,
        click.option(
            "--api-key",
            envvar="SHOAL_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help="API key.  Default: the key of the coordinator on this machine.",
        ),
        click.option(
            "--url",
            envvar="SHOAL_URL",
            show_envvar=True,
            metavar="URL",
            help="URL of the coordinator; several of one pool, separated by commas, "
            "are tried in turn.  Default: the coordinator on this machine, "
            f"from --data-dir, else {DEFAULT_ADDRESS}.",
        ),
    ):
        call = option(call)
    return call  # type: ignore[return-value]


def pass_api_with_json(function: F) -> F:
    """Add the options of ``pass_api``, and ``--json``."""
    return json_option(pass_api(function))


def _interrupt_at_end() -> None:
    """Have a closed terminal and SIGTERM interrupt the command, as Ctrl-C does.

    What it asked for is cancelled then.  ``nohup`` ignores a closed terminal.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, interrupt)


def limit_option(what: str) -> Callable[[F], F]:
    """Return a decorator that adds ``--limit``, of a list of ``what``."""
    return click.option(
        "--limit",
        type=int,
        default=20,
        show_default=True,
        metavar="N",
        help=f"Number of {what}.",
    )


class Duration(click.ParamType[int]):
    """A text such as ``12h``, as seconds."""

    name = "duration"
    SECONDS: Mapping[str, int] = {
        "s": 1,
        "m": 60,
        "h": 3600,
        "d": 86_400,
        "w": 7 * 86_400,
    }
    _FORM = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        found = self._FORM.fullmatch(value)
        if found is None or not int(found[1]):
            self.fail(
                f"expected a duration such as 12h or 30d, got {value!r}", param, ctx
            )
        return int(found[1]) * self.SECONDS[found[2]]


DURATION = Duration()


class SettingOption(click.Option):
    """The option of a setting; ``section`` and ``about`` group it in the help.

    Its value is None unless it is given: variables and the file are the loader's.
    """

    def __init__(
        self,
        param_decls: Sequence[str],
        section: str,
        about: str,
        setting: "Field[Any]",
    ) -> None:
        self.section = section
        self.heading = f"{section}: {about}" if about else section
        self.everyday = bool(setting.metadata.get("everyday"))
        self.secret = bool(setting.metadata.get("secret"))
        self.variable = variable(section, setting)
        form: dict[str, Any] = {
            "metavar": metavar(setting),
            "multiple": isinstance(setting.default, tuple),
        }
        if isinstance(setting.default, bool):
            form = {"is_flag": True}
        help_ = setting.metadata.get("help", "")
        notes = [f"env var: {self.variable}"]
        if _worth_showing(setting.default):
            notes.append(f"default: {setting.default}")
        super().__init__(
            param_decls,
            default=None,
            help=f"{help_[:1].upper()}{help_[1:]}.  [{'; '.join(notes)}]",
            **form,
        )


SHOWS_ALL = f"{__name__}.shows_all"  # in the context of a command's help


class SettingsCommand(click.Command):
    """A command with many settings: the help shows those of every day.

    ``--help-all`` shows all, in their sections.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show this message with all settings, and exit.",
            )
        )

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        left_out: list[str] = []
        shows_all = ctx.meta.get(SHOWS_ALL, False)
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None or isinstance(each, click.Argument):
                continue
            heading = "Options"
            if isinstance(each, SettingOption):
                if not (each.everyday or shows_all):
                    name, wire = each.opts[0], f"--{each.section}-"
                    left_out.append(f"{wire}…" if name.startswith(wire) else name)
                    continue
                if shows_all:
                    heading = each.heading
            sections.setdefault(heading, []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)
        if left_out:
            formatter.write_paragraph()
            names = ", ".join(dict.fromkeys(left_out))
            text = f"More options, described by --help-all: {names}"
            # Whole names, so that a search of the help finds them.
            lines = textwrap.wrap(text, formatter.width, break_on_hyphens=False)
            formatter.write("\n".join([*lines, ""]))

    def _show_all(self, ctx: click.Context, param: object, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[SHOWS_ALL] = True
            click.echo(self.get_help(ctx), color=ctx.color)
            ctx.exit()


def parse_pair(option: str, argument: str) -> tuple[str, str]:
    """Return the name and the value of an option's ``NAME=VALUE``."""
    name, equals, value = argument.partition("=")
    if not name or not equals:
        raise ConfigError(f"{option} {argument}: expected NAME=VALUE")
    return name, value


def wire_options(wires: "Mapping[str, AnyWireProtocol]") -> Callable[[F], F]:
    """Return a decorator that adds the options of wires."""

    def add(function: F) -> F:
        for wire, protocol in wires.items():
            function = setting_options(protocol.config, wire, protocol.peers)(function)
        return function

    return add


def setting_options(
    config: type[Any], section: str, about: str = ""
) -> Callable[[F], F]:
    """Return a decorator that adds an option for each field of ``config``.

    ``about`` explains the section's name in the help.
    """

    def add(function: F) -> F:
        for each in reversed(fields(config)):
            long = flag(section, each)
            if isinstance(each.default, bool) and not each.name.startswith("no_"):
                long += f"/--no-{long.removeprefix('--')}"
            function = click.option(
                long,
                parameter(section, each.name),
                cls=SettingOption,
                section=section,
                about=about,
                setting=each,
            )(function)
        return function

    return add


def given(
    values: Mapping[str, object], config: type[Any], section: str
) -> dict[str, object]:
    """Return the command line's values for ``config``, by field name.

    ``values`` are the parameters of the command.
    """
    return {
        each.name: _given(values[parameter(section, each.name)])
        for each in fields(config)
    }


def parameter(section: str, name: str) -> str:
    """Return the name of a setting's parameter."""
    return f"{section}__{name}"


def _given(value: object) -> object:
    if isinstance(value, tuple):
        return list(value) or None
    return value


def _worth_showing(default: object) -> bool:
    shown = isinstance(default, (str, int, float, Path)) and not isinstance(
        default, bool
    )
    return shown and default != ""
