"""`shoal chat` at a terminal."""

import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from harness.terminal import at_terminal
from live.programs import KEY, GatedModel, Pool, Programs, eventually
from models.tiny_answers import ANSWERS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")

STORY = "Tell me a story."
CTRL_C, CTRL_D, ESCAPE, UP = "\x03", "\x04", "\x1b", "\x1b[A"

Chat = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def chat(tmp_path: Path) -> Iterator[Chat]:
    """Starts a conversation with a pool; its data folder is the test's."""
    running: list[pexpect.spawn[str]] = []

    def start(pool: Pool, *arguments: str) -> "pexpect.spawn[str]":
        place = ["--url", pool.url, "--api-key", KEY, "--data-dir", str(tmp_path)]
        terminal = at_terminal(["chat", "--temperature", "0", *place, *arguments])
        running.append(terminal)
        return terminal

    yield start
    for each in running:
        each.close(force=True)


def test_conversation_at_a_terminal(pool: Pool, tmp_path: Path, chat: Chat) -> None:
    terminal = chat(pool)
    terminal.expect_exact("Talking to tiny.")

    terminal.send("ping\r")
    terminal.expect_exact("pong")
    terminal.expect(r"\d+ tokens, .*first token after \d+\.\d s, on one")

    terminal.send("/system be brief\r")
    terminal.expect_exact("system prompt: be brief")
    terminal.send("/model huge\r")
    terminal.expect_exact("no chat model 'huge'; the pool has: tiny")
    terminal.send("/swim\r")
    terminal.expect_exact("no command /swim; /help lists them")
    saved = tmp_path / "chat.md"
    terminal.send(f"/save {saved}\r")
    terminal.expect_exact("wrote")
    terminal.send("/clear\r")
    terminal.expect_exact("a new conversation begins")
    terminal.send(CTRL_D)
    terminal.expect(pexpect.EOF)
    terminal.wait()

    assert terminal.exitstatus == 0
    assert saved.read_text() == (
        "# Chat with tiny\n\n**system**\n\nbe brief\n\n"
        "**user**\n\nping\n\n**assistant**\n\npong\n"
    )
    history = tmp_path / "chat-history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert "+ping" in history.read_text()


# What is typed ahead begins the next question.
@pytest.mark.parametrize(
    ("keys", "next_keys"),
    [(CTRL_C, "ping\r"), (f"pi{UP}{ESCAPE}", "ng\r")],
    ids=["Ctrl-C", "Escape"],
)
def test_a_key_ends_the_answer_and_not_the_conversation(
    programs: Programs, slow_model: GatedModel, chat: Chat, keys: str, next_keys: str
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    begun = "".join(ANSWERS[STORY][:5])
    terminal = chat(pool)
    terminal.expect_exact("Talking to tiny.")

    terminal.send(f"{STORY}\r")
    terminal.expect_exact(begun)
    terminal.send(keys)
    terminal.expect_exact("stopped")
    check_cancelled(pool)
    slow_model.go_on.set()
    terminal.send(next_keys)
    terminal.expect_exact("pong")
    terminal.send("/exit\r")
    terminal.expect(pexpect.EOF)
    terminal.wait()

    assert terminal.exitstatus == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_who_ends_the_command_cancels_its_job(
    programs: Programs, slow_model: GatedModel, chat: Chat, number: signal.Signals
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    terminal = chat(pool, STORY)
    terminal.expect_exact("".join(ANSWERS[STORY][:5]))

    terminal.kill(number)
    terminal.expect(pexpect.EOF)
    terminal.wait()

    assert terminal.exitstatus == 130
    check_cancelled(pool)


def test_command_that_ends_while_its_job_waits_cancels_it(
    programs: Programs, slow_model: GatedModel, chat: Chat
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags, "--slots", "1")
    chat(pool, STORY).expect_exact("".join(ANSWERS[STORY][:5]))
    terminal = chat(pool, "ping")
    eventually(lambda: len(pool.admin("jobs")["data"]) == 2, "it waits")
    waiting, _ = pool.admin("jobs")["data"]

    terminal.kill(signal.SIGTERM)
    terminal.expect(pexpect.EOF)

    job = f"jobs/{waiting['id']}"
    eventually(lambda: pool.admin(job)["state"] == "cancelled", "it is cancelled")


def check_cancelled(pool: Pool) -> None:
    """Check that the only job so far ends, and its worker is free."""
    (job,) = pool.admin("jobs")["data"]
    eventually(lambda: pool.admin(f"jobs/{job['id']}")["state"] == "cancelled", "it is")
    eventually(lambda: not any(each["busy"] for each in pool.workers()), "it is free")


def test_terminal_says_what_an_answer_waits_for(
    programs: Programs, slow_model: GatedModel, chat: Chat
) -> None:
    pool = programs.serve()
    worker = pool.joined("slow", *slow_model.flags)
    terminal = chat(pool, STORY)
    terminal.expect_exact("".join(ANSWERS[STORY][:5]))

    worker.kill()
    terminal.expect_exact("waiting: ")
    slow_model.go_on.set()
    pool.joined("slow", *slow_model.flags)

    terminal.expect_exact(ANSWERS[STORY][-1])
    terminal.expect(pexpect.EOF)


def test_answer_goes_on_when_the_coordinator_comes_back(
    programs: Programs, slow_model: GatedModel, chat: Chat
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    begun = "".join(ANSWERS[STORY][:5])
    terminal = chat(pool, STORY)
    terminal.expect_exact(begun)

    pool.program.kill()
    terminal.expect_exact("waiting for the coordinator")
    programs.serve(port=pool.port)
    slow_model.go_on.set()
    terminal.expect_exact("on slow")
    terminal.expect(pexpect.EOF)
    terminal.wait()

    assert terminal.exitstatus == 0
    # Its worker goes on with the answer, if it has come back in time.
    assert slow_model.requests in (1, 2)


def test_unreachable_coordinator_is_reported_at_once(pool: Pool, chat: Chat) -> None:
    terminal = chat(pool, "--url", "http://127.0.0.1:1", "ping")

    terminal.expect_exact("shoal chat: cannot reach http://127.0.0.1:1")
    terminal.expect(pexpect.EOF)
    terminal.wait()

    assert terminal.exitstatus == 1
