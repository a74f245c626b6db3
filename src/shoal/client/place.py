"""Which coordinator a client asks, and as whom."""

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from shoal.domain.errors import ConfigError
from shoal.runtime.secret_files import CERTIFICATE_FILE, KEY_FILE
from shoal.runtime.whereabouts import url_here
from shoal.transports.tls import context_pinning, context_trusting


@dataclass(frozen=True, slots=True)
class Place:
    """A coordinator: its URL without a path, the key to show, and whom to trust.

    ``tls`` is None where the system's authorities are good.  ``given`` says whether
    somebody named it; else it is looked for on this machine.
    """

    url: str
    api_key: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    given: bool = True


def find(
    url: str | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | Path | None = None,
    cacert: str | Path | None = None,
) -> Place:
    """Return the coordinator that is meant.

    What is not given is looked for in SHOAL_URL, SHOAL_API_KEY, SHOAL_DATA_DIR and
    SHOAL_CACERT; after that it is the coordinator of this machine, with the URL, the
    key and the certificate that it keeps in its folder.

    Raises ConfigError naming what is missing or wrong.
    """
    folder = Path(data_dir or os.environ.get("SHOAL_DATA_DIR") or _own_folder())
    given = url or os.environ.get("SHOAL_URL")
    known = api_key or os.environ.get("SHOAL_API_KEY")
    authorities = cacert or os.environ.get("SHOAL_CACERT")
    place = _base(given or url_here(folder))
    return Place(
        place,
        known or _kept_key(folder),
        _trust(folder, authorities, known) if place.startswith("https:") else None,
        bool(given),
    )


def _own_folder() -> Path:
    return platformdirs.user_data_path("shoal", appauthor=False)


def _base(url: str) -> str:
    base = url if "://" in url else f"http://{url}"
    # The base URL that OpenAI clients are given is as good.
    base = base.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url {url!r}: expected http://HOST:PORT, or https://")
    return base


def _kept_key(folder: Path) -> str:
    try:
        return (folder / KEY_FILE).read_text().strip()
    except OSError as error:
        raise ConfigError(
            "no API key: `shoal serve` makes one for its own machine, elsewhere give "
            f"api_key=… or SHOAL_API_KEY ({folder / KEY_FILE}: {error.strerror})"
        ) from error


def _trust(
    folder: Path, authorities: str | Path | None, api_key: str | None
) -> ssl.SSLContext | None:
    """A key that was read from the coordinator's folder goes to that one alone."""
    if authorities:
        return context_trusting(Path(authorities))
    if api_key:
        return None
    try:
        return context_pinning((folder / CERTIFICATE_FILE).read_text())
    except FileNotFoundError:
        return None  # perhaps there is a proxy before it
