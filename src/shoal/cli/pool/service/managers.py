"""What runs services of a user: systemd on Linux, launchd on macOS.

Sources: systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.syntax(7);
launchd.plist(5), launchctl(1).
"""

import getpass
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.cli.main import EXIT_STORE_BROKEN
from shoal.config.private_files import FOLDER_MODE, write_private
from shoal.domain.errors import ConfigError

PATIENCE = 120.0  # seconds for a program: a service that stops has open jobs


@dataclass(frozen=True, slots=True)
class ServiceDefinition:
    """A command that runs in the background, in the folder where it was installed.

    ``variables`` hold its secrets, and what the environment set.  ``stop_timeout`` is
    in seconds.
    """

    command: str
    words: Sequence[str]
    folder: Path
    variables: Mapping[str, str]
    stop_timeout: float


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


EXIT_USAGE = 2
LINGERING = Path("/var/lib/systemd/linger")  # a file for each user
NO_SYSTEMD = (
    "services need systemd, which this system lacks: start `shoal serve` or `shoal "
    "join` with your own supervisor; both log to standard error, and stop on SIGTERM"
)
DESCRIPTIONS = {"serve": "Shoal coordinator", "join": "Shoal worker"}

UNIT = """\
[Unit]
Description={description}
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
WorkingDirectory={folder}
{environment}ExecStart={words}
{output}Restart=on-failure
RestartSec=5
RestartPreventExitStatus={hopeless}
KillMode=mixed
TimeoutStopSec={stop_timeout:.0f}
UMask=0077

[Install]
WantedBy=default.target
"""


class ServiceManager(Protocol):
    """What starts the services of a user, and reads a file for each."""

    def file(self, command: str) -> Path: ...
    def logs(self, command: str) -> str: ...
    def write(self, service: ServiceDefinition, environment: Path | None) -> None: ...
    def start(self, command: str) -> None: ...
    def remove(self, command: str) -> None: ...
    def state(self, command: str) -> str: ...
    def remarks(self) -> Iterator[str]: ...


class Systemd:
    """The services of this user.  Raises ConfigError without systemd."""

    def __init__(self) -> None:
        if shutil.which("systemctl") is None:
            raise ConfigError(NO_SYSTEMD)
        home = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        self._folder = Path(home) / "systemd" / "user"

    def file(self, command: str) -> Path:
        """Return the file of a command's unit."""
        return self._folder / f"shoal-{command}.service"

    def logs(self, command: str) -> str:
        """Return how to read a service's log."""
        return f"journalctl --user --unit shoal-{command}"

    def write(self, service: ServiceDefinition, environment: Path | None) -> None:
        """Write the unit of a service.  Raises ConfigError."""
        write(self.file(service.command), systemd_unit(service, environment))

    def start(self, command: str) -> None:
        """Start a service, or start it again, now and at each login.

        Raises ConfigError.
        """
        unit = self.file(command)
        try:
            run("systemctl", "--user", "daemon-reload")
            run("systemctl", "--user", "enable", unit.name)
            run("systemctl", "--user", "restart", unit.name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; the unit is {unit}: log in as this user, not by su or sudo, "
                f"then: systemctl --user enable --now {unit.stem}"
            ) from error

    def remove(self, command: str) -> None:
        """Stop a service, and delete its unit.

        Raises ConfigError if systemd cannot be asked; the unit is deleted even then.
        """
        unit = self.file(command)
        try:
            run("systemctl", "--user", "disable", "--now", unit.name)
            unit.unlink()
            run("systemctl", "--user", "daemon-reload")
        except ConfigError as error:
            unit.unlink(missing_ok=True)
            wanted = unit.parent / "default.target.wants" / unit.name
            wanted.unlink(missing_ok=True)
            raise ConfigError(
                f"{error}; {unit} is deleted, and the service runs until you log out"
            ) from error

    def state(self, command: str) -> str:
        """Return whether a service runs, in systemd's words."""
        try:
            shown = run(
                *("systemctl", "--user", "show", "--property", "ActiveState"),
                *("--value", self.file(command).name),
            )
        except ConfigError:
            return "unknown"
        return shown.strip() or "unknown"

    def remarks(self) -> Iterator[str]:
        """Yield what a user has to know."""
        if not (LINGERING / getpass.getuser()).exists():
            yield (
                "It runs while you are logged in.  To start it with the machine, and "
                "to keep it running: loginctl enable-linger"
            )


def systemd_unit(service: ServiceDefinition, environment: Path | None) -> str:
    """Return the unit of a service; ``environment`` is the file of its variables."""
    # The output of serve has keys, and others can read the journal.
    output = "StandardOutput=null\n" if service.command == "serve" else ""
    return UNIT.format(
        description=DESCRIPTIONS[service.command],
        folder=_unspecified(str(service.folder)),
        environment=(
            f"EnvironmentFile={_unspecified(str(environment))}\n" if environment else ""
        ),
        words=" ".join(map(_quoted, service.words)),
        output=output,
        hopeless=f"{EXIT_USAGE} {EXIT_STORE_BROKEN}",
        stop_timeout=service.stop_timeout,
    )


def _quoted(word: str) -> str:
    escaped = _unspecified(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("$", "$$")}"'


def _unspecified(text: str) -> str:
    return text.replace("%", "%%")


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
        # The output of serve has keys, and launchd's files grow without a limit.
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
    if sys.platform == "win32":
        return ""  # it has no launchd
    return f"gui/{os.getuid()}"
