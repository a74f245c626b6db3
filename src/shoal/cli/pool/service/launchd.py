"""Services of a user under launchd, on macOS.

Sources: launchd.plist(5), launchctl(1).
"""

import os
import plistlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.cli.pool.service.definition import ServiceDefinition
from shoal.cli.pool.service.files import run, write
from shoal.domain.errors import ConfigError

# launchd reads no file of variables.
WITH_VARIABLES = ["/bin/sh", "-c", 'set -a; . "$0"; set +a; exec "$@"']
NOT_LOADED = "not loaded"
RESTART_DELAY = 10  # seconds


class Launchd:
    """The agents of this user."""

    def __init__(self) -> None:
        self._library = Path.home() / "Library"

    def file(self, command: str) -> Path:
        """Return the file of a command's agent."""
        return self._library / "LaunchAgents" / f"{_label(command)}.plist"

    def logs(self, command: str) -> str:
        """Return how to read a service's log."""
        return f"tail -f {_logs(self._library) / command}.log"

    def write(self, service: ServiceDefinition, environment: Path | None) -> None:
        """Write the agent of a service.  Raises ConfigError."""
        _logs(self._library).mkdir(mode=0o700, parents=True, exist_ok=True)
        agent = launchd_agent(service, environment, _logs(self._library))
        write(self.file(service.command), agent.decode())

    def start(self, command: str) -> None:
        """Start a service, or start it again, now and at each login.

        Raises ConfigError.
        """
        if self.state(command) != NOT_LOADED:
            run("launchctl", "bootout", f"{_domain()}/{_label(command)}")
        run("launchctl", "bootstrap", _domain(), str(self.file(command)))

    def remove(self, command: str) -> None:
        """Delete the agent of a service, and stop it.  Raises ConfigError."""
        self.file(command).unlink()
        if self.state(command) != NOT_LOADED:
            run("launchctl", "bootout", f"{_domain()}/{_label(command)}")

    def state(self, command: str) -> str:
        """Return whether a service runs, in launchd's words."""
        try:
            shown = run("launchctl", "print", f"{_domain()}/{_label(command)}")
        except ConfigError:
            return NOT_LOADED
        lines = (line.strip().partition(" = ") for line in shown.splitlines())
        return next((value for name, _, value in lines if name == "state"), "loaded")

    def remarks(self) -> Iterator[str]:
        """Yield what a user has to know."""
        yield "It runs while you are logged in."


def launchd_agent(
    service: ServiceDefinition, environment: Path | None, logs: Path
) -> bytes:
    """Return the agent of a service, with its logs in a folder.

    ``environment`` is the file of its variables.
    """
    words, output = [*service.words], str(logs / f"{service.command}.log")
    errors = output
    if service.command == "serve":
        # What serve announces has keys, and launchd's files grow without a limit.
        if not any(word.startswith("--log-file=") for word in words):
            words.append(f"--log-file={output}")
        output, errors = "/dev/null", str(logs / "serve-errors.log")
    if environment is not None:
        words = [*WITH_VARIABLES, str(environment), *words]
    agent: dict[str, Any] = {
        "Label": _label(service.command),
        "ProgramArguments": words,
        "WorkingDirectory": str(service.folder),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_DELAY,
        "ExitTimeOut": round(service.stop_timeout),
        "StandardOutPath": output,
        "StandardErrorPath": errors,
        "Umask": 0o77,
    }
    return plistlib.dumps(agent)


def _label(command: str) -> str:
    return f"shoal.{command}"


def _logs(library: Path) -> Path:
    return library / "Logs" / "shoal"


def _domain() -> str:
    return f"gui/{os.getuid()}"
