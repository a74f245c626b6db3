"""The other commands, as a user types them."""

import json
import re
import subprocess
import sys

import pytest

from live.programs import KEY, PATIENCE, GatedModel, Pool, Programs, eventually
from models.tiny_answers import ANSWERS


def shoal(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def connection(pool: Pool) -> list[str]:
    return ["--url", pool.url, "--api-key", KEY]


def test_chat_replaces_the_dash_with_its_input(pool: Pool) -> None:
    words = ["What is", "-"]

    done = shoal(
        "chat", *connection(pool), "--temperature", "0", *words, typed="two plus two?"
    )

    assert done.stdout == ANSWERS["What is two plus two?"] + "\n"


@pytest.mark.parametrize("words", [[], [""], ["-"]])
def test_chat_rejects_an_empty_prompt(pool: Pool, words: list[str]) -> None:
    done = shoal("chat", *connection(pool), *words, typed="")

    assert done.returncode == 1
    assert "the prompt is empty" in done.stderr


def test_chat_accepts_an_openai_base_url(pool: Pool) -> None:
    base = pool.url.removeprefix("http://") + "/v1"

    done = shoal("chat", "--url", base, "--api-key", KEY, "--temperature", "0", "ping")

    assert done.stdout == "pong\n"


def test_chat_prints_json_on_request(pool: Pool) -> None:
    done = shoal("chat", *connection(pool), "--temperature", "0", "--json", "ping")

    told = json.loads(done.stdout)
    assert (told["model"], told["text"]) == ("tiny", "pong")
    assert (told["finish_reason"], told["worker"]) == ("stop", "shoal:one/tiny")


def test_chat_reports_a_truncated_answer(pool: Pool) -> None:
    done = shoal("chat", *connection(pool), "--max-tokens", "3", "Count to sixty.")

    assert done.returncode == 0
    assert done.stderr == "(truncated at the token limit)\n"


def test_closed_pipe_is_no_error(pool: Pool) -> None:
    command = [
        sys.executable,
        "-m",
        "shoal",
        "chat",
        *connection(pool),
        "Tell me a story.",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as chat:
        assert chat.stdout is not None
        assert chat.stderr is not None
        chat.stdout.close()
        errors = chat.stderr.read()

    assert errors == ""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(words: list[str]) -> None:
    done = shoal(*words)

    assert done.returncode == 0
    for command in ("serve", "join", "chat", "status", "demo", "version"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize(
    "command", ["serve", "join", "chat", "status", "demo", "version"]
)
def test_every_command_has_help(command: str) -> None:
    done = shoal(command, "--help")

    assert done.returncode == 0
    assert done.stdout.lower().startswith(f"usage: shoal {command}")


def test_unknown_command_error_says_how_to_list_the_commands() -> None:
    done = shoal("swim")

    assert done.returncode == 2
    assert "No such command 'swim'" in done.stderr
    assert "`shoal --help`" in done.stderr


def test_version_is_printed_as_text_and_json() -> None:
    versions = json.loads(shoal("version", "--json").stdout)

    assert versions.keys() >= {"shoal", "python", "aiohttp"}
    assert shoal("--version").stdout == f"shoal {versions['shoal']}\n"
    assert shoal("version").stdout.startswith(f"shoal {versions['shoal']}\n")


def test_chat_answers_one_question(pool: Pool) -> None:
    done = shoal(
        "chat", *connection(pool), "--temperature", "0", "Write", "a", "haiku."
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ANSWERS["Write a haiku."] + "\n"


def test_chat_reads_its_question_from_a_pipe(pool: Pool) -> None:
    done = shoal("chat", *connection(pool), "--temperature", "0", typed="ping")

    assert done.stdout == "pong\n"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", "sk-wrong"], "incorrect API key"),
        (["--model", "huge"], "no worker has the model huge: the pool has tiny"),
        (["--url", "http://127.0.0.1:1"], "is `shoal serve` running there?"),
        (["--url", "ftp://x"], "--url ftp://x: expected http://HOST:PORT"),
    ],
)
def test_failed_chat_has_a_reason(pool: Pool, flags: list[str], said: str) -> None:
    done = shoal("chat", *connection(pool), *flags, "ping")

    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_find_the_key_of_the_coordinator_on_this_machine(
    programs: Programs,
) -> None:
    folder = str(programs.folder / "data")
    serve = programs.run("serve", "--json", "--port", "0", "--data-dir", folder)
    url = serve.event("ready")["url"]

    done = shoal("status", "--url", url, "--data-dir", folder, "--json")

    assert json.loads(done.stdout)["workers"] == []
    assert "no workers:" in shoal("status", "--url", url, "--data-dir", folder).stdout
    assert (
        "the pool has no chat model"
        in shoal("chat", "--url", url, "--data-dir", folder, "x").stderr
    )


def test_status_shows_the_workers(pool: Pool) -> None:
    # The job of a command that ended early may still be there.
    eventually(lambda: not any(each["busy"] for each in pool.workers()), "all is idle")
    status = json.loads(shoal("status", *connection(pool), "--json").stdout)

    (worker,) = (each for each in status["workers"] if "one" in each["id"])
    assert worker["models"] == ["tiny"]
    assert (worker["slots"], worker["busy"]) == (4, 0)
    assert status["ready"] is True
    shown = shoal("status", *connection(pool)).stdout
    assert re.search(r"^one +active +0/4 ", shown, re.MULTILINE)
    assert "; shoal (encrypted); Shoal " in shown


def test_other_server_is_not_a_coordinator(slow_model: GatedModel) -> None:
    _, url = slow_model.flags

    done = shoal("status", "--url", url, "--api-key", KEY)

    assert done.returncode == 1
    assert f"{url} is not a Shoal coordinator" in done.stderr
    assert "Traceback" not in done.stderr


def test_jobs_are_listed_explained_and_shown(pool: Pool) -> None:
    pool.joined("otter")
    with pool.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ping"}], temperature=0
        )

    listed = shoal("jobs", "ls", *connection(pool))
    explained = shoal("jobs", "explain", answer.id, *connection(pool))
    shown = shoal("jobs", "show", answer.id, "--json", *connection(pool))
    ended = shoal("jobs", "cancel", answer.id, *connection(pool))

    assert answer.id.removeprefix("chatcmpl-") in listed.stdout
    assert "given to" in explained.stdout
    assert json.loads(shown.stdout)["outcome"]["text"] == "pong"
    assert ended.returncode == 1
    assert "has ended: done" in ended.stderr


@pytest.mark.short
def test_alias_answers_until_it_is_removed(pool: Pool) -> None:
    ask = ("chat", *connection(pool), "--temperature", "0", "--json")
    ask = (*ask, "--model", "gpt-4o-mini", "ping")
    aliases = ("models", "alias")

    made = shoal(*aliases, "set", "gpt-4o-mini", "absent,tiny", *connection(pool))
    answer = json.loads(shoal(*ask).stdout)
    listed = shoal(*aliases, "ls", *connection(pool)).stdout
    jobs = json.loads(shoal("jobs", "ls", "--json", *connection(pool)).stdout)["data"]
    explained = shoal("jobs", "explain", jobs[0]["id"], *connection(pool)).stdout
    removed = shoal(*aliases, "rm", "gpt-4o-mini", *connection(pool))
    refused = shoal(*ask)

    assert made.stdout == "gpt-4o-mini stands for absent, tiny: now tiny\n"
    assert answer["text"] == "pong"
    assert jobs[0]["model"] == "tiny"
    assert "gpt-4o-mini" in listed
    assert "for tiny, requested as gpt-4o-mini" in explained
    assert removed.returncode == 0
    assert "no worker has the model gpt-4o-mini" in refused.stderr
