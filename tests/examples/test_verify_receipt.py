"""The second verifier, as a command; what it says is compared in tests/ledger."""

import ast
import subprocess
import sys
from pathlib import Path

from harness.speed import scaled
from ledger.builders import EXAMPLE, KEY, OUTPUT, WORKER, grown
from shoal.ledger import bundle, consistency

LINES_MAX = 105


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLE, *words],
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )


def test_a_receipt_is_verified_with_nothing_but_the_key(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    file.write_bytes(bundle.write(grown(3).bundle(0, OUTPUT)))

    done = run(file, "--key", KEY.hex())

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "the file is complete and canonical (RFC 8785)",
        "the coordinator of this key signed the receipt",
        "the receipt is in the log that the coordinator signed",
        "the output matches the receipt",
        "the worker signed a receipt",
        "verified",
    ]


def test_the_first_step_that_fails_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    file.write_bytes(bundle.write(grown(3).bundle(0, "{}")))

    done = run(file, "--key", KEY.hex())

    assert done.returncode == 1
    assert done.stderr == "FAILED: the output matches the receipt\n"
    assert "verified" not in done.stdout


def test_another_coordinators_key_verifies_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    file.write_bytes(bundle.write(grown(3).bundle()))

    done = run(file, "--key", WORKER.public_key.hex())

    assert done.returncode == 1
    assert done.stderr == "FAILED: the coordinator of this key signed the receipt\n"


def test_a_log_that_grew_is_verified(tmp_path: Path) -> None:
    file = tmp_path / "growth.json"
    file.write_bytes(consistency.write(grown(7).growth(3, 7)))

    done = run(file, "--key", KEY.hex())

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("extends the earlier one\nverified\n")


def test_what_is_no_file_of_ours_fails(tmp_path: Path) -> None:
    file = tmp_path / "bundle.json"
    for data in (b"", b"\xff", b"{}\n", b"[" * 100_000):
        file.write_bytes(data)

        done = run(file, "--key", KEY.hex())

        assert done.returncode == 1
        assert done.stderr.startswith("FAILED: the file is complete")


def test_it_is_short_and_stands_alone() -> None:
    text = EXAMPLE.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [each.name for each in node.names]
        )
    }

    assert len(text.splitlines()) <= LINES_MAX
    assert imported - set(sys.stdlib_module_names) == {"cryptography"}
