"""The file that holds the running coordinator's URL.

Commands and programs on this machine read it to find the coordinator.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.config.private_files import write_private
from shoal.config.secret_files import CERTIFICATE_FILE

URL_FILE = "url"
DEFAULT_ADDRESS = "127.0.0.1:4010"
URL_MAX = 2048  # characters that are read of the file

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@contextmanager
def publish_url(folder: Path, host: str, port: int, *, secure: bool) -> Iterator[None]:
    """Publish the URL of the server on ``host`` within the block.

    Raises OSError if the folder is not writable.
    """
    within = _LOOPBACK_OF.get(host, f"[{host}]" if ":" in host else host)
    file = folder / URL_FILE
    write_private(file, f"{'https' if secure else 'http'}://{within}:{port}\n")
    try:
        yield
    finally:
        with suppress(OSError):  # a stale URL is harmless
            file.unlink()


def local_url(folder: Path) -> str:
    """Return the URL of this machine's coordinator, or else its default URL.

    The URL of a killed coordinator stays until the next one starts.
    """
    with suppress(OSError, UnicodeDecodeError), (folder / URL_FILE).open() as file:
        kept = file.read(URL_MAX).strip()
        if kept.startswith(("http://", "https://")):
            return kept
    # A coordinator with TLS stores its certificate in its folder.
    secure = (folder / CERTIFICATE_FILE).exists()
    return f"{'https' if secure else 'http'}://{DEFAULT_ADDRESS}"
