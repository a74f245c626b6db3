"""``shoal receipts``: exported by a complete coordinator, and verified without it."""

import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.commands import shoal
from gateway.providers import committed, provider
from gateway.serving import Pool, serving
from protocols.contexts import SIGNER
from shoal.cli.main import main
from shoal.protocols.dispatch import Config

KEY = SIGNER.public_key.hex()  # of the coordinator


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path / "data", wires=wires) as running:
        yield running


@pytest.fixture
async def job(pool: Pool) -> str:
    """The id of a job with a receipt."""
    async with provider(pool) as worker:
        job_id = await committed(pool)
        await worker.job()
        await worker.complete(job_id, {"sentiment": "positive"})
    return job_id


async def test_exported_receipt_is_verified(
    pool: Pool, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"

    assert await shoal(pool, "receipts", "key") == 0
    assert capsys.readouterr().out == f"{KEY}\n"
    assert await shoal(pool, "receipts", "export", job, "-o", str(file)) == 0
    assert f"shoal receipts verify {file}" in capsys.readouterr().err
    assert main(["receipts", "verify", str(file), "--key", KEY]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verified"
    assert {line.split()[0] for line in lines[:-1]} == {"ok"}


async def test_changed_receipt_is_not_verified(
    pool: Pool, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "receipt.json"
    await shoal(pool, "receipts", "export", job, "--output", str(file), "--json")
    assert json.loads(capsys.readouterr().out) == {"file": str(file)}
    file.write_bytes(file.read_bytes().replace(job.encode(), b"x" * len(job)))

    assert main(["receipts", "verify", str(file), "--key", KEY, "--json"]) == 1

    verdict = json.loads(capsys.readouterr().out)
    assert verdict["verified"] is False
    assert any(each["wrong"] for each in verdict["steps"])


async def test_exported_bytes_pass_through_a_pipe(
    pool: Pool,
    job: str,
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await shoal(pool, "receipts", "export", job) == 0
    exported = capsysbinary.readouterr().out
    async with pool.session.get(
        f"{pool.url}/v1/receipts/{job}", headers=pool.headers()
    ) as response:
        assert exported == await response.read()

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(exported)))
    assert main(["receipts", "verify", "-", "--key", KEY]) == 0


async def test_receipts_are_listed_in_pages(
    pool: Pool, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await shoal(pool, "receipts", "ls", "--limit", "1") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["LOG", "JOB"]
    assert row.split()[:2] == ["0", job]

    assert await shoal(pool, "receipts", "ls", "--before", "0") == 0
    assert capsys.readouterr().out == "no receipts yet\n"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--key", "ab"], "--key: expected 64 hexadecimal digits"),
        ([], "no public key: give --key"),
    ],
)
def test_verification_needs_a_key(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    reason: str,
) -> None:
    file = tmp_path / "receipt.json"
    file.write_text("{}")

    data = ("--data-dir", str(tmp_path))
    assert main(["receipts", "verify", str(file), *flags, *data]) == 1

    assert reason in capsys.readouterr().err


def test_missing_file_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["receipts", "verify", str(tmp_path / "no"), "--key", KEY]) == 1

    assert f"{tmp_path / 'no'}: No such file" in capsys.readouterr().err
