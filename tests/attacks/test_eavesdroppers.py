"""Somebody between workers and their coordinator, with real processes.

Reads everything, changes bytes, removes the encryption, or pretends to be the
coordinator.  Without a token this gets neither the token, nor prompts, nor answers.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from attacks.eavesdropper import Eavesdropper
from live.programs import (
    KEY,
    PATIENCE,
    TOKEN,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from shoal.domain.credentials import digest_of
from shoal.protocols.seam.encrypted_stream import PREFACE

PROMPT = "a prompt that nobody else may read"
ANSWER = ["an ", "answer ", "that ", "nobody ", "else ", "may ", "read ", "either"]
ARGUMENT = "an argument that nobody else may read"
pytestmark = pytest.mark.long

FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
MODULE = """
import shoal

@shoal.task(name="echo")
def echo(text: str) -> str:
    return text
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """The coordinator of all tests."""
    running = Programs(tmp_path_factory.mktemp("coordinator"))
    try:
        yield running.serve(*FLEET)
    finally:
        running.close()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    """Workers, which end with their test."""
    running = Programs(tmp_path)
    yield running
    running.close()


@pytest.fixture
def between(pool: Pool, programs: Programs) -> Iterator[Eavesdropper]:
    """Somebody between the coordinator and its workers."""
    listening = Eavesdropper(pool.ready["ports"])
    yield listening
    listening.close()
    programs.close()
    eventually(lambda: not pool.workers(), "the workers have left")


@pytest.fixture
def model() -> Iterator[GatedModel]:
    """A model that knows one answer, and waits in the middle of it."""
    model = GatedModel(pause=4, pairs={PROMPT: ANSWER})
    yield model
    model.close()


def join(programs: Programs, between: Eavesdropper, *flags: str) -> Program:
    return programs.run(*("join", between.url, "--json", "--token", TOKEN), *flags)


def ask(pool: Pool) -> str:
    with pool.client() as client, answer_to(client, PROMPT) as stream:
        return "".join(text_in(stream))


SECRETS = [
    TOKEN.encode(),
    TOKEN.encode().hex().encode(),
    digest_of(TOKEN),
    digest_of(TOKEN).hex().encode(),
    PROMPT.encode(),
    *(each.encode() for each in ANSWER if len(each) > 5),
    ARGUMENT.encode(),
]


def leaked(between: Eavesdropper) -> list[bytes]:
    seen = between.seen
    return [each for each in SECRETS if each in seen]


def test_an_eavesdropper_reads_no_token_prompt_or_answer(
    pool: Pool,
    programs: Programs,
    between: Eavesdropper,
    model: GatedModel,
) -> None:
    model.go_on.set()
    join(programs, between, *model.flags).event("joined")

    assert ask(pool) == "".join(ANSWER)

    assert leaked(between) == []
    assert PREFACE in between.taps["http"].seen
    (status,) = pool.workers()
    assert status["protection"] == "noise"


def test_the_same_without_encryption_is_read(
    pool: Pool,
    programs: Programs,
    between: Eavesdropper,
    model: GatedModel,
) -> None:
    """The control: what the eavesdropper would find."""
    model.go_on.set()
    join(programs, between, *model.flags, "--plain").event("joined")

    assert ask(pool) == "".join(ANSWER)

    found = leaked(between)
    assert TOKEN.encode() in found
    assert PROMPT.encode() in found
    assert PROMPT.encode() in between.taps["http"].seen
    (status,) = pool.workers()
    assert status["protection"] == "plain"


@pytest.mark.parametrize(
    ("wire", "port"), [("auto", "http"), ("macfleet", "macfleet_transport")]
)
def test_an_eavesdropper_reads_no_argument_of_a_function(
    pool: Pool, programs: Programs, between: Eavesdropper, wire: str, port: str
) -> None:
    module = programs.folder / "echoing.py"
    module.write_text(MODULE)
    worker = join(programs, between, "--tasks", str(module), "--wire", wire)
    worker.event("joined")

    with shoal.Pool(pool.url, KEY) as client:
        result: Any = client.submit("echo", ARGUMENT).result(PATIENCE)

    assert result == ARGUMENT
    assert leaked(between) == []
    assert between.taps[port].seen


def test_a_job_whose_bytes_are_changed_is_done_by_another_worker(
    pool: Pool,
    programs: Programs,
    between: Eavesdropper,
    model: GatedModel,
) -> None:
    join(programs, between, *model.flags, "--name", "attacked").event("joined")
    tap = between.taps["http"]

    with pool.client() as client, answer_to(client, PROMPT) as stream:
        texts = text_in(stream)
        begun = next(texts)
        other = ("--json", "--name", "other", "--token", TOKEN)
        programs.run("join", pool.url, *other, *model.flags).event("joined")
        tap.to_server = _flip
        model.go_on.set()
        answer = begun + "".join(texts)

    assert answer == "".join(ANSWER)
    assert model.requests == 2


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("token", ["", "3d5f7191b3d5f7192b4d6f80"])
def test_who_pretends_to_be_the_coordinator_gets_nothing(
    programs: Programs, model: GatedModel, token: str
) -> None:
    """``token`` is that of the pretender; empty: it admits any worker."""
    pretender = programs.serve("--join-token", token, "--log-level", "debug")
    between = Eavesdropper(pretender.ready["ports"])

    worker = join(programs, between, *model.flags)

    if token:
        assert "Invalid token" in worker.event("refused")["reason"]
    else:
        assert "not proved the join token" in worker.event("waiting")["reason"]
    assert pretender.workers() == []
    assert leaked(between) == []
    known = pretender.program.errors.encode()
    files = (each for each in programs.data.rglob("*") if each.is_file())
    assert not any(TOKEN.encode() in each for each in (known, *map(_content, files)))
    assert model.requests == 0
    between.close()


def _content(file: Path) -> bytes:
    return file.read_bytes()


def test_a_replayed_connection_admits_nobody(
    pool: Pool,
    programs: Programs,
    between: Eavesdropper,
    model: GatedModel,
) -> None:
    sent = bytearray()

    def record(data: bytes) -> bytes:
        sent.extend(data)
        return data

    between.taps["http"].to_server = record
    worker = join(programs, between, *model.flags)
    worker.event("joined")
    worker.terminate()
    eventually(lambda: not pool.workers(), "the worker has left")

    replay = pool.ready["ports"]["http"]
    with socket.create_connection(("127.0.0.1", replay), PATIENCE) as attacker:
        attacker.sendall(bytes(sent))
        while attacker.recv(1 << 16):
            pass

    assert pool.workers() == []
