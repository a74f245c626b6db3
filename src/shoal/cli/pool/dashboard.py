"""``shoal dashboard``: open the pool's dashboard in the browser, signed in."""

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping

import click
import psutil

from shoal.cli.options import json_option, pass_api
from shoal.cli.terminal import printable, show
from shoal.client.coordinator import CoordinatorApi

PATH = "/dashboard/links"
FRAGMENT = "#signin="

USERS = range(1000 if sys.platform == "linux" else 501, 60_000)
"""The numbers of people's accounts; the others are of services."""

DESKTOPS = ("DISPLAY", "WAYLAND_DISPLAY")
"""The variables that name a desktop on Linux."""

NO_DESKTOP = "open it in a browser"
OTHER_USERS = (
    "open it in a browser yourself: the browser's arguments would show the link to the "
    "other users of this machine"
)


@click.command("dashboard")
@click.option(
    "--no-browser", is_flag=True, help="Only print the link, also at a terminal."
)
@json_option
@pass_api
def command(api: CoordinatorApi, no_browser: bool, as_json: bool) -> None:
    """Open the pool's dashboard in the browser, signed in.

    Standard output has the link, which signs one browser in within an hour, as the key
    of this command: it takes one with the scope admin.
    """
    found = api.request(PATH, method="POST")
    # The address that was reached: the coordinator does not know that of a proxy.
    _, _, code = found["url"].partition(FRAGMENT)
    link = printable(f"{api.http_url}/{FRAGMENT}{code}")
    show(found | {"url": link}, as_json, link)
    if as_json or no_browser or not sys.stdout.isatty():
        return
    reason = why_unopened(sys.platform, os.environ, has_other_users)
    if reason or not webbrowser.open(link):
        click.echo(reason or NO_DESKTOP, err=True)


def why_unopened(
    platform: str, environ: Mapping[str, str], others: Callable[[], bool]
) -> str:
    """Return why no browser is opened; empty: nothing is in the way.

    ``others`` says whether other people use this machine.
    """
    if platform == "linux" and not any(environ.get(each) for each in DESKTOPS):
        return NO_DESKTOP  # a text browser would take over the terminal
    if platform != "win32" and others():
        return OTHER_USERS
    return ""


def has_other_users() -> bool:
    """Say whether somebody else uses this machine, who could list its processes."""
    numbers = {
        each.info["uids"].real
        for each in psutil.process_iter(["uids"])
        if each.info["uids"] is not None
    }
    return any(each in USERS for each in numbers - {os.getuid()})
