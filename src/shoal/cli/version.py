"""Print the versions of Shoal and its main dependencies."""

import argparse
import importlib.metadata
import json
import platform

from shoal import __version__

PARTS = ("aiohttp", "msgspec", "uvloop", "xllamacpp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    versions = {"shoal": __version__, "python": platform.python_version()}
    for part in PARTS:
        try:
            versions[part] = importlib.metadata.version(part)
        except importlib.metadata.PackageNotFoundError:
            versions[part] = "not installed"
    if args.json:
        print(json.dumps(versions))
    else:
        print("\n".join(f"{name} {version}" for name, version in versions.items()))
    return 0
