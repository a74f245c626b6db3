"""Where the coordinator of this machine is: its URL, kept in its folder while it runs.

Commands and programs here then find it at whatever port it was given.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.runtime.secret_files import CERTIFICATE_FILE, keep_private

URL_FILE = "url"
DEFAULT = "127.0.0.1:4010"
URL_MAX = 2048  # characters that are read of the file

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@contextmanager
def leaving_url(folder: Path, host: str, port: int, *, secure: bool) -> Iterator[None]:
    """Keep the URL of what listens on ``host``, for the length of the block.

    Raises OSError if the folder cannot be written to.
    """
    within = _LOOPBACK_OF.get(host, f"[{host}]" if ":" in host else host)
    file = folder / URL_FILE
    keep_private(file, f"{'https' if secure else 'http'}://{within}:{port}\n")
    try:
        yield
    finally:
        with suppress(OSError):  # what is left names a place where nobody answers
            file.unlink()


def url_here(folder: Path) -> str:
    """Return where the coordinator of this machine is, or would be by default.

    One that was killed leaves its URL behind, which holds until the next one starts.
    """
    with suppress(OSError, UnicodeDecodeError), (folder / URL_FILE).open() as file:
        kept = file.read(URL_MAX).strip()
        if kept.startswith(("http://", "https://")):
            return kept
    # It leaves its certificate there if it has one.
    secure = (folder / CERTIFICATE_FILE).exists()
    return f"{'https' if secure else 'http'}://{DEFAULT}"
