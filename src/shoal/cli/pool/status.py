"""``shoal status``: a pool's machines and jobs, once or live."""

import json
import time

import click

from shoal.cli.options import json_option, pass_api
from shoal.cli.pool.status_view import status_lines
from shoal.cli.terminal import console, printable
from shoal.client.coordinator import CoordinatorApi
from shoal.client.errors import ConnectionLost

PATH = "/admin/status"
WATCH_INTERVAL = 2.0  # seconds


@click.command("status")
@click.option(
    "--watch",
    is_flag=True,
    help="Show it live, until Ctrl-C; with --json, one line every two seconds.",
)
@json_option
@pass_api
def command(api: CoordinatorApi, watch: bool, as_json: bool) -> None:
    """Show a pool's machines and jobs."""
    if watch and not as_json and not console().is_terminal:
        raise click.UsageError("--watch needs a terminal, or --json")
    if not watch:
        _print(api, as_json=as_json)
    elif as_json:
        while True:
            _print(api, as_json=True)
            time.sleep(WATCH_INTERVAL)
    else:
        _watch(api)


def _print(api: CoordinatorApi, *, as_json: bool) -> None:
    status = api.request(PATH)
    if as_json:
        click.echo(json.dumps(status))
        return
    for line in status_lines(status, api.base_url, time.time()):
        click.echo(line)


def _watch(api: CoordinatorApi) -> None:
    """Show the status on the whole terminal; a coordinator that is away is told."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            try:
                status = api.request(PATH)
                lines = [*status_lines(status, api.base_url, time.time())]
            except ConnectionLost as error:
                lines = [printable(str(error)), "", "trying again …"]
            live.update(Text.from_ansi("\n".join(lines)), refresh=True)
            time.sleep(WATCH_INTERVAL)
