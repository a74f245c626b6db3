"""MB/s of one model of 512 MB from a coordinator of Shoal's on loopback, against curl.

curl reads the same file from Python's own static file server, in the open, and writes
it to the same disk.  Shoal's copy goes over its own wire, encrypted, and is on the disk
when it is said to be there; curl's is not.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from processes import free_port, program, server
from report import Goal, Results

ROUNDS = 3
SIZE = 512 * 10**6  # bytes
TOKEN = "a-token-of-this-benchmark"

CURL = "curl: MB/s"
SHOAL = "shoal: MB/s"
GOALS = [Goal(SHOAL, per=CURL, at_least=0.7)]


def measure(rounds: int) -> Results:
    results: Results = {CURL: [], SHOAL: []}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "files")
        files.mkdir()
        _fill(files / "model.gguf")
        for _ in range(rounds):
            results[CURL].append(_curl(files, Path(folder, "got")))
            results[SHOAL].append(_shoal(files, Path(folder)))
    return results


def _fill(path: Path) -> None:
    block = os.urandom(1_000_000)  # the same again and again: nothing here compresses
    with path.open("wb") as file:
        for _ in range(SIZE // len(block)):
            file.write(block)


def _curl(files: Path, got: Path) -> float:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "-b", "127.0.0.1"]
    url = f"http://127.0.0.1:{port}/"
    with server([*command, "-d", str(files)], url):
        done = subprocess.run(
            ["curl", "-s", "-o", got, "-w", "%{time_total}", f"{url}model.gguf"],
            check=True,
            capture_output=True,
        )
    assert got.stat().st_size == SIZE
    got.unlink()
    return SIZE / 1e6 / float(done.stdout)


def _shoal(files: Path, folder: Path) -> float:
    models = folder / "models"
    with program(
        *("-m", "shoal", "serve", "--port", "0", "--data-dir", str(folder / "data")),
        *("--json", "--log-level", "warning", "--join-token", TOKEN),
        *("--share", f"model={files}"),
    ) as serving:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "shoal", "models", "get", "model", "--json"),
                *("--from", serving.report["url"], "--token", TOKEN),
                *("--to", str(models)),
            ],
            check=True,
            capture_output=True,
        )
    got = json.loads(done.stdout)
    assert got["size"] == SIZE
    shutil.rmtree(models)
    return SIZE / 1e6 / float(got["seconds"])
