"""A command's log in a file, with its warnings and errors also on standard error."""

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from shoal.cli.command_loop import prepared
from shoal.config.private_files import FILE_MODE
from shoal.domain.errors import ConfigError

LOG_FILE = "serve.log"  # of a coordinator, in its data folder
SIZE_MAX = 10 << 20  # bytes of a file, before another one is begun
OLDER = 3  # files that are kept beside it, as FILE.1 to FILE.3


def log_to_file(file: Path, level: str, form: str) -> None:
    """Log to a file, which only its owner can read if it is new.

    Standard error, on which ``log_to_stderr`` began, gets warnings and errors only.

    Raises ConfigError if the file cannot be written.
    """
    try:
        _create(file)
        handler = _LogFile(file, maxBytes=SIZE_MAX, backupCount=OLDER, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--log-file {file}: {error.strerror}; `--log-file -` logs to standard "
            "error"
        ) from error
    handler.rotator = _rotate
    log = logging.getLogger()
    for screen in log.handlers:
        screen.setLevel(logging.WARNING)
    log.addHandler(prepared(handler, level, form))


class _LogFile(RotatingFileHandler):
    """A log file that says once on standard error if it cannot be written."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  its name
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            print(
                f"the log is incomplete: {self.baseFilename}: {error.strerror}",
                file=sys.stderr,
            )


def _rotate(source: str, target: str) -> None:
    os.replace(source, target)
    _create(Path(source))


def _create(file: Path) -> None:
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY, FILE_MODE))
