"""``shoal service``: run serve or join in the background, as a service of this user.

A service runs a command line without secrets, and has variables with them.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shoal.cli.options import SettingOption, json_option
from shoal.cli.pool.service import managers
from shoal.cli.terminal import Columns, show, show_table
from shoal.config.loader import SECRET_FILE, USER_FILE
from shoal.domain.errors import ConfigError

COMMANDS = ("serve", "join")
COLUMNS: Columns = {"SERVICE": "service", "STATE": "state", "FILE": "file"}
ABSENT = "not installed"

service_argument = click.argument("service", type=click.Choice(COMMANDS))


@click.group("service")
def command() -> None:
    """Run serve or join in the background, as a service of this user.

    The service restarts if it fails, and starts with each login.  systemd runs it on
    Linux, and launchd on macOS.
    """


@command.command("install")
@service_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--no-start", is_flag=True, help="Only write the files.")
@json_option
@click.pass_context
def install(
    context: click.Context,
    service: str,
    arguments: tuple[str, ...],
    no_start: bool,
    as_json: bool,
) -> None:
    """Install and start a service; replace it if it is installed.

    ARGUMENTS are those of `shoal serve` or `shoal join`, after `--`.  Secrets among
    them, and SHOAL_ variables of this shell, are stored in a file that only you can
    read.
    """
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    wanted = root.command.get_command(root, service)
    assert wanted is not None
    definition = define_service(wanted, arguments)
    manager = _manager(definition)
    environment = _environment_file(service)
    if definition.variables:
        managers.write(environment, environment_text(definition.variables))
    else:
        environment.unlink(missing_ok=True)
    manager.write(definition, environment if definition.variables else None)
    if not no_start:
        manager.start(service)
    shown = {
        "service": service,
        "file": str(manager.file(service)),
        "environment_file": str(environment) if definition.variables else None,
        "variables": [*definition.variables],
        "started": not no_start,
        "logs": manager.logs(service),
    }
    lines = [f"{'wrote' if no_start else 'started'} {manager.file(service)}"]
    if definition.variables:
        names = ", ".join(definition.variables)
        lines.append(f"{names}: in {environment}, which only you can read")
    lines += [f"log: {manager.logs(service)}", *manager.remarks()]
    show(shown, as_json, *lines)


@command.command("uninstall")
@service_argument
@json_option
def uninstall(service: str, as_json: bool) -> None:
    """Stop a service, and delete its files; its data stays."""
    manager = _manager()
    file = manager.file(service)
    if not file.exists():
        raise ConfigError(f"the service {service} is not installed: there is no {file}")
    _environment_file(service).unlink(missing_ok=True)
    manager.remove(service)
    show({"service": service, "file": str(file)}, as_json, f"removed {file}")


@command.command("status")
@click.argument("services", type=click.Choice(COMMANDS), nargs=-1)
@json_option
def status(services: tuple[str, ...], as_json: bool) -> None:
    """Show which services are installed and running."""
    manager = _manager()
    found = []
    for each in services or COMMANDS:
        file = manager.file(each)
        state = manager.state(each) if file.exists() else ABSENT
        found.append({"service": each, "state": state, "file": str(file)})
    show_table({"data": found}, as_json, COLUMNS, found)


def _manager(
    definition: managers.ServiceDefinition | None = None,
) -> managers.ServiceManager:
    """Return what manages services here; raises ConfigError if nothing does."""
    if sys.platform == "win32":
        task = "" if definition is None else f": {schtasks_command(definition)}"
        raise ConfigError(
            "Windows has no user services; Task Scheduler can start a program at each "
            f"logon{task}"
        )
    return managers.Launchd() if sys.platform == "darwin" else managers.Systemd()


def schtasks_command(definition: managers.ServiceDefinition) -> str:
    """Return the command by which Windows' Task Scheduler starts a service.

    Its secrets are left to the variables of the user.
    """
    run = subprocess.list2cmdline(definition.words)
    name = f"Shoal {definition.command}"
    words = ["schtasks", "/Create", "/SC", "ONLOGON", "/TN", name, "/TR", run]
    created = subprocess.list2cmdline(words)
    named = ", ".join(definition.variables)
    return f"{created}; before, set {named} with setx" if named else created


def _environment_file(service: str) -> Path:
    return USER_FILE.parent / f"{service}.env"


STOP_RESERVE = 30.0  # seconds to stop, beside those for open jobs
ESCAPED = str.maketrans({each: f"\\{each}" for each in '\\"`$'})


def define_service(
    command: click.Command,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> managers.ServiceDefinition:
    """Return the service of a command with these arguments.

    Raises click.UsageError if the command refuses them, ConfigError if a variable
    cannot be stored.
    """
    name = str(command.name)
    with command.make_context(f"shoal {name}", [*arguments]) as context:
        words: list[str] = []
        variables: dict[str, str] = {}
        for each in command.get_params(context):
            source = context.get_parameter_source(str(each.name))
            value = context.params.get(str(each.name))
            if source is not ParameterSource.COMMANDLINE:
                variables |= _given(each, environment)
            elif isinstance(each, SettingOption) and each.secret:
                variables[each.variable] = str(value)
            else:
                words += _words(each, value)
        drain = float(context.params.get("serve__drain") or 30.0)
    for variable, value in variables.items():
        if not value.isprintable():
            raise ConfigError(f"{variable}: expected a single line of text")
    return managers.ServiceDefinition(
        name, [*_program(), name, *words], Path.cwd(), variables, drain + STOP_RESERVE
    )


def environment_text(variables: Mapping[str, str]) -> str:
    """Return a file of variables, as systemd and shells read it."""
    return "".join(
        f'{name}="{value.translate(ESCAPED)}"\n' for name, value in variables.items()
    )


def _given(
    parameter: click.Parameter, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of the environment that set a parameter."""
    names: list[str] = []
    if isinstance(parameter, SettingOption):
        names = [parameter.variable]
        if parameter.secret:
            names.append(parameter.variable + SECRET_FILE)
    elif isinstance(parameter.envvar, str):
        names = [parameter.envvar]
    return {name: environment[name] for name in names if name in environment}


def _words(parameter: click.Parameter, value: Any) -> Iterator[str]:
    """Yield the words that set a parameter."""
    if isinstance(parameter, click.Argument):
        yield str(value)
    elif isinstance(parameter, click.Option):
        option = max(parameter.opts, key=len)
        if parameter.is_flag:
            yield option if value else max(parameter.secondary_opts, key=len)
        else:
            values = value if parameter.multiple else [value]
            yield from (f"{option}={each}" for each in values)


def _program() -> Sequence[str]:
    """Return the words that start this copy of Shoal."""
    script = Path(sys.executable).with_name("shoal")
    return [str(script)] if script.exists() else [sys.executable, "-m", "shoal"]
