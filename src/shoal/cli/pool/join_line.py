"""``shoal join-line``: print the command that adds a machine."""

import io
import shlex
from urllib.parse import urlsplit

import click
import segno

from shoal.cli.options import json_option, pass_api
from shoal.cli.terminal import printable, show
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.addresses import is_own_host

PATH = "/admin/join"
NO_QR = "The command is too long for a QR code."
LOOPBACK_ONLY = (
    "Only its own machine can reach this coordinator.  To add other machines, start it "
    "with:\n  shoal serve --host 0.0.0.0 --tls auto"
)


@click.command("join-line")
@click.option("--qr", is_flag=True, help="the command as a QR code, too")
@json_option
@pass_api
def command(api: CoordinatorApi, qr: bool, as_json: bool) -> None:
    """Print the command that adds a machine to the pool.

    Standard output has the command alone, with the address that other machines can
    reach: that of --url, if it is not this machine's own, else the coordinator's.  The
    QR code goes to standard error.
    """
    found = api.request(PATH)
    urls, loopback_only = list(found["urls"]), found["loopback_only"]
    asked = urlsplit(api.http_url)
    if not is_own_host(asked.hostname or ""):
        # It may be that of a proxy or a container, which the coordinator does not know.
        url = asked.geturl()
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
    try:
        code = segno.make(text, error="l", micro=False)
    except segno.DataOverflowError:
        return NO_QR
    drawn = io.StringIO()
    code.terminal(drawn, compact=True)
    return drawn.getvalue()
