"""The programs that manage services, and the files that they read."""

import subprocess
from pathlib import Path

from shoal.config.private_files import FOLDER_MODE, write_private
from shoal.domain.errors import ConfigError

PATIENCE = 120.0  # seconds for a program: a service that stops has open jobs


def run(*words: str) -> str:
    """Run a program; return its output.  Raises ConfigError if it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from error
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def write(file: Path, text: str) -> None:
    """Write a file that only its owner can read.  Raises ConfigError."""
    try:
        file.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        write_private(file, text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
