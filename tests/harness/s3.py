"""An S3-compatible server of the tests' own, from a package."""

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from urllib.request import Request, urlopen

import pytest

from harness.ports import free_port

PAUSE = 0.02  # seconds between looks whether the server accepts connections
_numbers = count(1)


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Run a server for the tests of a process; give its URL."""
    for needed in ("moto", "flask", "obstore"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: make test installs it")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _accepts(port):
            assert process.poll() is None, "the S3 server has ended"
            time.sleep(PAUSE)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a bucket; return what ``--contents`` names it by."""
    for name, value in (
        ("AWS_ENDPOINT_URL", s3),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "tests"),
        ("AWS_SECRET_ACCESS_KEY", "tests"),
    ):
        monkeypatch.setenv(name, value)
    bucket = f"pool-{next(_numbers)}"
    with urlopen(Request(f"{s3}/{bucket}", method="PUT")):
        return f"s3://{bucket}/a/pool"


def _accepts(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
