"""The commands for jobs, quotes and pairings at a complete coordinator."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.commands import shoal
from gateway.providers import provider
from gateway.serving import Pool, serving
from protocols.dispatch.recorded import SIGNERS
from shoal.protocols.dispatch import Config

A = SIGNERS["A"].public_key.hex()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path, wires={"dispatch": Config(open=True)}) as running:
        yield running


async def test_submitted_job_is_awaited_and_its_result_printed(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ("--type", "TASK", "--task", "classify", "--user", "ada")
    command = ("jobs", "submit", "great", *task, "--wait")
    async with provider(pool) as worker, asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(shoal(pool, *command))
        job = await worker.job()
        await worker.complete(job["job_id"], {"sentiment": "positive"})

    assert ended.result() == 0
    assert capsys.readouterr().out == '{"sentiment": "positive"}\n'
    assert job["payload"] == {"task_type": "classify", "input": "great"}
    terms = (job["job_type"], job["policy"], job["privacy_class"], job["user_id"])
    assert terms == ("TASK", "CHEAP", "PUBLIC", "ada")


async def test_submitted_prompt_prints_the_id_of_its_job(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--policy", "CHEAP", "--max-tokens", "8", "--json")
    async with provider(pool) as worker:
        assert await shoal(pool, "jobs", "submit", "hi", *flags) == 0
        job = await worker.job()

    assert json.loads(capsys.readouterr().out) == {"job_id": job["job_id"]}
    assert job["payload"] == {"prompt": "hi", "max_tokens": 8}
    assert job["policy"] == "CHEAP"


async def test_whole_payload_can_be_given(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = {"prompt": "hi", "job_type": "LLM_INFER"}
    async with provider(pool) as worker:
        text = json.dumps(payload)
        assert await shoal(pool, "jobs", "submit", "--payload", text) == 0
        assert (await worker.job())["payload"] == payload


async def test_input_is_read_from_a_pipe(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a long\nprompt"))
    async with provider(pool) as worker:
        assert await shoal(pool, "jobs", "submit", "-", "--policy", "fast") == 0
        job = await worker.job()

    assert job["payload"] == {"prompt": "a long\nprompt"}
    assert job["policy"] == "FAST"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("hi", "--privacy", "private", "--user", "al b"),
            "with the user; `shoal pair create 'al b'` creates a code that pairs one",
        ),
        (("hi", "--type", "TASK"), "give the name of the task with --task"),
        (("hi", "--task", "classify"), "--task: only for --type TASK"),
        (
            ("hi", "--type", "task", "--task", "classify", "--model", "m"),
            "--model: only for --type LLM_INFER",
        ),
        (("{", "--payload"), "--payload: expected JSON"),
        (
            ("{}", "--payload", "--max-tokens", "8"),
            "--max-tokens: with --payload, give it in the payload",
        ),
    ],
)
async def test_refused_submission_says_why(
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    error: str,
) -> None:
    assert await shoal(pool, "jobs", "submit", *arguments) == 1
    assert error in capsys.readouterr().err


async def test_without_a_login_name_only_a_submission_needs_a_user(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_entry() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr("getpass.getuser", no_entry)

    assert await shoal(pool, "jobs", "ls") == 0
    assert await shoal(pool, "jobs", "submit", "hi") == 1
    assert "give the user with --user" in capsys.readouterr().err


async def test_quote_prints_the_price(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await shoal(pool, "quote") == 0
    assert await shoal(pool, "quote", "--type", "TASK", "--policy", "FAST") == 0

    printed = capsys.readouterr().out.splitlines()
    assert printed == ["$0.010  LLM_INFER FAST", "$0.003  TASK FAST"]


async def test_worker_is_paired_listed_and_revoked(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await shoal(pool, "pair", "create", "ada") == 0
    code, _, _, command = capsys.readouterr().out.splitlines()
    assert command == f"  shoal join … --pairing-code {code}"

    assert await shoal(pool, "pair", "claim", code.lower(), A) == 0
    assert await shoal(pool, "pair", "ls", "ada") == 0
    claimed, head, row = capsys.readouterr().out.splitlines()
    assert claimed == f"paired {A} with ada"
    assert (head.split(), row.split()[0]) == (["WORKER", "PAIRED"], A)

    assert await shoal(pool, "pair", "revoke", "ada", A, "--yes") == 0
    assert await shoal(pool, "pair", "ls", "ada") == 0
    revoked, empty = capsys.readouterr().out.splitlines()
    assert revoked == f"revoked {A}"
    assert empty.endswith("shoal pair create ada")

    assert await shoal(pool, "pair", "claim", code, A) == 1
    assert "no such code" in capsys.readouterr().err
