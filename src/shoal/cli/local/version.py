"""``shoal version``: the versions of Shoal and its main dependencies."""

import importlib.metadata
import json
import platform

import click

from shoal import __version__
from shoal.cli.options import json_option

PARTS = ("aiohttp", "msgspec", "uvloop", "xllamacpp")


@click.command("version")
@json_option
def command(as_json: bool) -> None:
    """Print the versions of Shoal and its main dependencies."""
    versions = {"shoal": __version__, "python": platform.python_version()}
    for part in PARTS:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            versions[part] = "not installed"
    if as_json:
        click.echo(json.dumps(versions))
    else:
        click.echo("\n".join(f"{name} {version}" for name, version in versions.items()))
