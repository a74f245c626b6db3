"""A coordinator whose database is on a PostgreSQL server, which is killed."""

import json
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from gateway.batches.uploads import CHAT_PATH, jsonl
from harness.postgres import PostgresServer, postgres_server
from harness.slow_imports import openai
from live.programs import (
    KEY,
    TOKEN,
    GatedModel,
    Pool,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS
from shoal.domain.credentials import with_fingerprint, without_fingerprint

STORY = "Tell me a story."


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


def ready(url: str) -> int:
    try:
        with urlopen(f"{url}/readyz") as answer:
            status: int = answer.status
            return status
    except HTTPError as error:
        return error.code


def client_of(pool: Pool) -> "openai.OpenAI":
    """Return a client that trusts the pool's authority."""
    trusted = ssl.create_default_context(cafile=pool.ready["authority"])
    return openai.OpenAI(
        base_url=f"{pool.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=trusted),
    )


def public_key(client: "openai.OpenAI", pool: Pool) -> str:
    """Return the key that signs the log of receipts."""
    log = client.get(f"{pool.url}/v1/log", cast_to=object)
    assert isinstance(log, dict)
    return str(log["public_key"])


def test_answers_survive_a_kill_of_the_database(
    programs: Programs, server: PostgresServer, slow_model: GatedModel
) -> None:
    pool = programs.serve("--store", server.url(), "--log-level", "info")
    pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        text = next(pieces)

        server.kill()
        with pytest.raises(
            openai.InternalServerError, match="the database cannot be reached"
        ) as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": STORY}]
            )
        assert caught.value.status_code == 503
        assert ready(pool.url) == 503
        slow_model.go_on.set()
        while len(text) < len(ANSWERS[STORY]):
            text += next(pieces)

        server.start()
        eventually(lambda: ready(pool.url) == 200, "it has healed")
        assert text + "".join(pieces) == ANSWERS[STORY]

    with pool.client() as client, answer_to(client, STORY) as stream:
        assert "".join(text_in(stream)) == ANSWERS[STORY]
    log = pool.program.errors
    assert "store failing" in log
    assert server.url() in log
    assert pool.program.terminate() == 0

    flags = ("--store", server.url(), "--data-dir", str(programs.data))
    checked = programs.run("db", "check", *flags)
    assert checked.wait() == 0, checked.errors
    copied = programs.run("db", "backup", str(programs.folder / "copy"), *flags)
    assert copied.wait() == 1
    assert "pg_dump --format=custom" in copied.errors
    # The data folder has no database; another start finds all on the server.
    assert not [*programs.data.glob("shoal.db*")]
    pool = programs.serve("--store", server.url())
    with pool.client() as client:
        jobs = client.get(f"{pool.url}/v1/jobs", cast_to=object)
    assert isinstance(jobs, dict)
    assert len(jobs["jobs"]) == 2


def test_a_lost_data_folder_loses_nothing(
    programs: Programs, server: PostgresServer, slow_model: GatedModel
) -> None:
    flags = ("--store", server.url(), "--tls", "auto")
    pool = programs.serve(*flags)
    pinned = pool.ready["pinned_key"]
    _, fingerprint = without_fingerprint(pinned)
    token = with_fingerprint(TOKEN, fingerprint)
    worker = pool.join("one", *slow_model.flags, token=token)
    worker.event("joined")
    with client_of(pool) as client:
        signer = public_key(client, pool)
        line = {"model": "tiny", "messages": [{"role": "user", "content": STORY}]}
        request = {"custom_id": "c", "method": "POST", "url": CHAT_PATH, "body": line}
        file = client.files.create(file=("in", jsonl([request])), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
        )
        eventually(lambda: slow_model.requests > 0, "the line runs")

    pool.program.kill()
    shutil.rmtree(programs.data)
    pool = programs.serve(*flags, port=pool.port)  # where the worker looks for it
    slow_model.go_on.set()

    with client_of(pool) as client:
        eventually(
            lambda: client.batches.retrieve(batch.id).status == "completed",
            "the batch has ended",
        )
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        assert json.dumps("".join(ANSWERS[STORY])) in client.files.content(output).text
        assert public_key(client, pool) == signer
    assert pool.ready["pinned_key"] == pinned


def test_a_pool_moves_to_a_server(
    programs: Programs, server: PostgresServer, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("one", *slow_model.flags)
    slow_model.go_on.set()
    with pool.client() as client, answer_to(client, STORY) as stream:
        assert "".join(text_in(stream)) == ANSWERS[STORY]
    assert pool.program.terminate() == 0
    flags = ("--store", server.url(), "--data-dir", str(programs.data))

    moved = programs.run("db", "copy", *flags)

    assert moved.wait() == 0, moved.errors
    pool = programs.serve("--store", server.url())
    with pool.client() as client:
        jobs = client.get(f"{pool.url}/v1/jobs", cast_to=object)
    assert isinstance(jobs, dict)
    assert len(jobs["jobs"]) == 1
    assert pool.program.terminate() == 0
    checked = programs.run("db", "check", *flags)
    assert checked.wait() == 0, checked.errors


def test_a_database_has_one_coordinator(
    programs: Programs, server: PostgresServer
) -> None:
    first = programs.serve("--store", server.url())
    other = Programs(programs.folder / "other")
    other.folder.mkdir()

    second = other.start("--store", server.url())

    assert second.wait() == 1
    assert "is in use by" in second.errors
    assert "stop that `shoal serve`" in second.errors
    # After a kill, which tells the server nothing, another takes the pool over.
    first.program.kill()
    assert other.serve("--store", server.url()).workers() == []
    other.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://host/x", "--store: expected postgresql://USER@HOST/DATABASE"),
        ("postgresql://shoal@127.0.0.1:1/x", "Connection refused"),
    ],
)
def test_a_database_that_cannot_be_used_says_why(
    programs: Programs, url: str, message: str
) -> None:
    program = programs.start("--store", url)

    assert program.wait() != 0
    assert message in program.errors
    assert "Traceback" not in program.errors


WITHOUT = """
import sys
sys.modules["psycopg"] = None
from shoal.cli.main import main
raise SystemExit(main())
"""


def test_a_missing_extra_is_named(programs: Programs) -> None:
    command = ("serve", "--store", "postgresql://x@127.0.0.1/x", "--port", "0")
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, *command, "--data-dir", str(programs.data)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1, ended
    assert "postgres" in ended.stderr
    assert "pip install" in ended.stderr or "uv" in ended.stderr
