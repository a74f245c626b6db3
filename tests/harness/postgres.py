"""A PostgreSQL server of the tests' own, as the demonstration starts it."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import psycopg
import pytest
from local_postgres import PAUSE, LocalPostgres, accepts, folder_of_server

from harness.ports import free_port

POOLER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_numbers = count(1)


class PostgresServer(LocalPostgres):
    """A server whose access changes, and with PgBouncer before it."""

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

    @contextmanager
    def disk(self, size: int) -> Iterator["Disk"]:
        """Create a database on a disk of its own, of ``size`` bytes, in the block."""
        folder = self.data.with_name("disk")
        folder.mkdir()
        owner = f"uid={self._as['user']},gid={self._as['group']}"
        options = f"size={size},mode=700,{owner}"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True
        )
        try:
            with psycopg.connect(self.url(), autocommit=True) as connection:
                connection.execute(f"CREATE TABLESPACE disk LOCATION '{folder}'")
                connection.execute(
                    "CREATE DATABASE on_disk TEMPLATE template0 TABLESPACE disk"
                )
            yield Disk(folder, self.url("on_disk"))
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)

    def _reload(self) -> None:
        """Let the server read who has access, for connections from now on."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        # The signal is handled between two connections.
        loaded = "SELECT pg_conf_load_time() > now() - interval '1 minute'"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(loaded)

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
            while not accepts(port):
                assert process.poll() is None, self._log.read_text()
                time.sleep(PAUSE)
            yield f"postgresql://shoal@127.0.0.1:{port}/postgres"
        finally:
            process.kill()
            process.wait()


class Disk:
    """A disk that can be filled, and the URL of the database on it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no space at all."""
        with self._ballast.open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"x" * 4096)

    def free(self) -> None:
        self._ballast.unlink()


@contextmanager
def postgres_server(*settings: str) -> Iterator[PostgresServer]:
    """Run a server for the length of the block."""
    with folder_of_server() as folder:
        server = PostgresServer(folder, free_port(), *settings)
        server.start()
        try:
            yield server
        finally:
            server.stop()


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
