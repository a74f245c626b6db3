"""Services of a user under systemd, on Linux.

Sources: systemd.unit(5), systemd.service(5), systemd.exec(5) and systemd.syntax(7).
"""

import getpass
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shoal.cli.main import EXIT_STORE_BROKEN
from shoal.cli.pool.service.definition import ServiceDefinition
from shoal.cli.pool.service.files import run, write
from shoal.domain.errors import ConfigError

EXIT_USAGE = 2
LINGERING = Path("/var/lib/systemd/linger")  # a file for each user
NO_SYSTEMD = (
    "this system has no systemd, which runs services: have your own supervisor start "
    "`shoal serve` or `shoal join`; both log to standard error, and stop on SIGTERM"
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
    # What serve announces has keys, and journals are for others to read.
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
