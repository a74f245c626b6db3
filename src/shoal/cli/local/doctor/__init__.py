"""``shoal doctor``: examines this machine and its coordinator."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.text import Text

from shoal.cli.local.doctor import checks
from shoal.cli.options import config_file_option, pass_api_with_json
from shoal.cli.terminal import console, printable
from shoal.client.coordinator import CoordinatorApi
from shoal.config import ServeConfig
from shoal.config.loader import load

STYLES = {
    checks.Severity.OK: "green",
    checks.Severity.WARNING: "yellow",
    checks.Severity.FAILED: "bold red",
}
START = (
    "to start a pool here: shoal serve; for a pool elsewhere, give --url and --api-key"
)


@click.command("doctor")
@config_file_option
@pass_api_with_json
def command(api: CoordinatorApi, config_file: Path, as_json: bool) -> int:
    """Check this machine and its coordinator, and say how to fix what it finds.

    The exit status is 1 if something does not work.
    """
    serve = load(ServeConfig, "serve", {"data_dir": str(api.data_dir)}, config_file)
    worst = 0
    for finding in examine(checks.Examined(api, serve)):
        worst |= finding.severity is checks.Severity.FAILED
        if as_json:
            click.echo(
                json.dumps({**asdict(finding), "severity": finding.severity.value})
            )
        else:
            _print(finding)
    return worst


def examine(examined: checks.Examined) -> Iterator[checks.Finding]:
    """Yield what is found, as it is found."""
    health, why_not = checks.find_health(examined.api)
    examined = replace(examined, health=health)
    for check in checks.MACHINE_CHECKS:
        yield from check(examined)
    if health is None:
        yield checks.warning("coordinator", why_not, START)
        return
    for check in checks.COORDINATOR_CHECKS:
        yield from check(examined)


def _print(finding: checks.Finding) -> None:
    out = console()
    line = Text.assemble(
        (f"{finding.severity.value:8}", STYLES[finding.severity]),
        f"{finding.subject:12}",
        printable(finding.text),
    )
    out.print(line, soft_wrap=True)
    if finding.remedy:
        out.print(f"{'':20}→ {printable(finding.remedy)}", markup=False, soft_wrap=True)
