"""What a service runs: a command line without secrets, and the variables with them."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from shoal.cli.options import SettingOption
from shoal.config.loader import SECRET_FILE
from shoal.domain.errors import ConfigError

STOP_RESERVE = 30.0  # seconds to stop, beside those for open jobs
ESCAPED = str.maketrans({each: f"\\{each}" for each in '\\"`$'})


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """A command that runs in the background, in the folder where it was installed.

    ``variables`` hold its secrets, and what the environment set.  ``stop_timeout`` is
    in seconds.
    """

    command: str
    words: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    stop_timeout: float


def define_service(
    command: click.Command,
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> ServiceDefinition:
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
    return ServiceDefinition(
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
