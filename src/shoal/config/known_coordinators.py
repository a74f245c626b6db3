"""The coordinators that have admitted this machine, by their URLs.

A worker proves its own key to such a coordinator, and expects this key of it, so that
neither needs the join token again.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config.private_files import make_private_folder, replace_private

FILE = "coordinators.json"


@dataclass(frozen=True, slots=True)
class KnownCoordinator:
    """A coordinator: its public key and the fingerprint of its TLS key, as hexadecimal.

    The fingerprint is empty without TLS, or if a certificate authority is trusted.
    """

    key: str
    fingerprint: str = ""


def known_coordinator(folder: Path, url: str) -> KnownCoordinator | None:
    """Return the coordinator at a URL; None if it has not admitted this machine."""
    return _read(folder / FILE).get(url)


def remember_coordinator(folder: Path, url: str, known: KnownCoordinator) -> None:
    """Write down a coordinator that has admitted this machine.  Raises OSError."""
    coordinators = _read(folder / FILE)
    if coordinators.get(url) == known:
        return
    coordinators[url] = known
    make_private_folder(folder)
    listed = {each: asdict(its) for each, its in coordinators.items()}
    replace_private(folder / FILE, json.dumps(listed, indent=1) + "\n")


def _read(file: Path) -> dict[str, KnownCoordinator]:
    """Return the coordinators in a file; none if it cannot be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        listed = json.loads(file.read_text())
        return {url: KnownCoordinator(**its) for url, its in listed.items()}
    return {}
