"""Ways into a pool: ``shoal join-line`` for machines and ``shoal dashboard``."""

import io
import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import click
import psutil

from shoal.cli.options import pass_api_with_json
from shoal.cli.terminal import printable, show
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.addresses import is_own_host

JOIN_PATH = "/admin/join"
NO_QR = "The command is too long for a QR code."
LOOPBACK_ONLY = (
    "Only this machine can reach this coordinator.  To add other machines, start it "
    "with:\n  shoal serve --host 0.0.0.0 --tls auto"
)


@click.command("join-line")
@click.option("--qr", is_flag=True, help="Also print the command as a QR code.")
@pass_api_with_json
def join_line(api: CoordinatorApi, qr: bool, as_json: bool) -> None:
    """Print the command that adds a machine to the pool.

    Prints only the command to standard output, with an address that other machines can
    reach: the one given by --url, unless it is this machine's own, else the
    coordinator's.  The QR code goes to standard error.
    """
    found = api.request(JOIN_PATH)
    urls, loopback_only = list(found["urls"]), found["loopback_only"]
    given = urlsplit(api.http_url)
    if not is_own_host(given.hostname or ""):
        # It may be that of a proxy or a container, which the coordinator does not know.
        url = given.geturl()
        urls, loopback_only = [url, *(each for each in urls if each != url)], False
    words = ["shoal", "join", urls[0]]
    if found["token"]:
        words += ["--token", found["token"]]
    join = shlex.join(words)
    if as_json:
        shown = {"join": join, "urls": urls, "loopback_only": loopback_only}
        # The image is for the dashboard, and may have another address.
        fields = {name: value for name, value in found.items() if name != "qr"}
        show(fields | shown, as_json)
        return
    click.echo(printable(join))
    if qr:
        click.echo(_drawn(join), err=True)
    if loopback_only:
        click.echo(LOOPBACK_ONLY, err=True)
    elif len(urls) > 1:
        others = "\n  ".join(map(printable, urls[1:]))
        click.echo(f"Its addresses on other networks:\n  {others}", err=True)


def _drawn(text: str) -> str:
    """Return a text as a QR code for a terminal; a remark if it is too long for one."""
    import segno  # most output has no code

    try:
        code = segno.make(text, error="l", micro=False)
    except segno.DataOverflowError:
        return NO_QR
    drawn = io.StringIO()
    code.terminal(drawn, compact=True)
    return drawn.getvalue()


LINKS_PATH = "/dashboard/links"
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
@click.option("--no-browser", is_flag=True, help="Print the link, and open no browser.")
@pass_api_with_json
def dashboard(api: CoordinatorApi, no_browser: bool, as_json: bool) -> None:
    """Open the pool's dashboard in the browser, signed in.

    Prints a link that signs one browser in, within an hour, with the API key of this
    command.  The key needs the scope admin.
    """
    found = api.request(LINKS_PATH, method="POST")
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
    if sys.platform == "win32":
        return False  # it has no numbers of users
    numbers = {
        each.info["uids"].real
        for each in psutil.process_iter(["uids"])
        if each.info["uids"] is not None
    }
    return any(each in USERS for each in numbers - {os.getuid()})
