"""``shoal keys`` and ``shoal tokens`` as a user types them."""

import json
import subprocess
import sys
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from harness.slow_imports import openai
from live.programs import KEY, PATIENCE, TINY, Pool, Programs, eventually


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def run_json(pool: Pool, *arguments: str) -> Any:
    """Run a command that prints JSON."""
    done = shoal(*arguments, "--json", "--url", pool.url, "--api-key", KEY)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def client(pool: Pool, key: str) -> "openai.OpenAI":
    return openai.OpenAI(base_url=f"{pool.url}/v1", api_key=key, max_retries=0)


def ping(client: "openai.OpenAI") -> str | None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "ping"}],
        max_tokens=10,
        temperature=0,
    )
    return answer.choices[0].message.content


def test_worker_rejoins_by_its_key_until_the_token_is_revoked(
    programs: Programs,
) -> None:
    pool = programs.serve()
    made = run_json(pool, "tokens", "create", "lab", "--uses", "1", "--expires", "1h")
    first = pool.join("lab", token=made["token"])
    first.event("joined")
    first.terminate()

    words = ("join", pool.url, "--json", "--name", "lab", "--model", f"tiny={TINY}")
    again = programs.run(*words)

    again.event("joined")
    run_json(pool, "tokens", "revoke", "lab")
    lines = iter(again.line, None)
    assert any("token was revoked" in line for line in lines)
    assert again.wait() == 1


def test_key_is_created_used_and_revoked(programs: Programs) -> None:
    pool = programs.serve()
    pool.joined("one")
    made = run_json(pool, "keys", "create", "alice", "--expires", "30d")

    with client(pool, made["key"]) as alice:
        assert ping(alice) == "pong"
        _, listed = run_json(pool, "keys", "ls")["data"]
        assert (listed["name"], listed["requests"]) == ("alice", 1)
        assert listed["completion_tokens"] > 0

        run_json(pool, "keys", "revoke", "alice")

        with pytest.raises(openai.AuthenticationError) as caught:
            ping(alice)
    assert caught.value.code == "revoked_api_key"
    (first,) = run_json(pool, "keys", "ls")["data"]
    assert (first["name"], first["scope"]) == ("default", "admin")
    _, old = run_json(pool, "keys", "ls", "--all")["data"]
    assert old["revoked_at"] is not None


def test_key_has_the_requested_limits(pool: Pool) -> None:
    made = run_json(pool, "keys", "create", "once", "--requests-per-minute", "1")
    looker = run_json(pool, "keys", "create", "looker", "--scope", "read")

    with client(pool, made["key"]) as once:
        assert ping(once) == "pong"
        with pytest.raises(openai.RateLimitError):
            ping(once)
    with client(pool, looker["key"]) as look:
        assert [model.id for model in look.models.list()] == ["tiny"]
        with pytest.raises(openai.PermissionDeniedError):
            ping(look)


def test_output_is_readable_text(pool: Pool) -> None:
    as_admin = ("--url", pool.url, "--api-key", KEY)

    made = shoal("keys", "create", "worded", "--budget", "5", *as_admin)
    listed = shoal("keys", "ls", *as_admin)
    token = shoal("tokens", "create", "worded", "--uses", "1", *as_admin)
    tokens = shoal("tokens", "ls", *as_admin)

    key, _, rest = made.stdout.partition("\n")
    assert key.startswith("sk-shoal-")
    assert "It is shown only once" in rest
    assert "5 total tokens" in listed.stdout
    assert key not in listed.stdout
    join = token.stdout.partition("\n")[0]
    assert join.startswith(f"shoal join {pool.url} --token jt-")
    assert join.endswith(" --name worded")
    assert "0 of 1" in tokens.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["keys"], 2, "revoke  Revoke a key"),
        (["keys", "create"], 2, "Missing argument 'NAME'"),
        (["keys", "create", "a b"], 1, "name: expected up to 64 letters"),
        (["keys", "create", "default"], 1, "default is reserved"),
        (["keys", "create", "x", "--scope", "root"], 2, "'root' is not one of"),
        (["keys", "create", "x", "--expires", "soon"], 2, "such as 12h or 30d"),
        (["keys", "create", "x", "--expires", "999999w"], 1, "expires_in: expected"),
        (["keys", "create", "x", "--budget", "many"], 2, "'many' is not a valid"),
        (["keys", "create", "x", "--budget", "0"], 1, "budget: expected"),
        (["keys", "revoke", "nobody"], 1, "there is no key nobody"),
        (["keys", "revoke", "default"], 1, "--api-key"),
        (["tokens", "create", "x", "--uses", "0"], 1, "uses: expected"),
        (["tokens", "revoke", "a/../b"], 1, "there is no join token a/../b"),
    ],
)
def test_mistake_is_an_error_that_names_it(
    pool: Pool, arguments: list[str], status: int, said: str
) -> None:
    connection = ["--url", pool.url, "--api-key", KEY] if len(arguments) > 1 else []

    done = shoal(*arguments, *connection)

    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_insufficient_scope_error_names_the_required_one(pool: Pool) -> None:
    user = run_json(pool, "keys", "create", "user")

    done = shoal("keys", "ls", "--url", pool.url, "--api-key", user["key"])

    assert done.returncode == 1
    assert (
        "user has the scope use; this needs one with the scope monitor" in done.stderr
    )


def test_worker_joins_by_a_token_until_it_is_revoked(programs: Programs) -> None:
    pool = programs.serve()
    made = run_json(
        pool, "tokens", "create", "lab", "--uses", "1", "--models", "tiny,qwen*"
    )
    worker = pool.join("lab", token=made["token"])
    worker.event("joined")
    (listed,) = run_json(pool, "tokens", "ls")["data"]
    assert listed["present"] == 1
    assert [each.endswith(":lab") for each in listed["workers"]] == [True]

    second = pool.join("thief", token=made["token"])
    assert "used by other workers" in second.event("refused")["reason"]
    assert second.wait() == 1

    run_json(pool, "tokens", "revoke", "lab")

    assert "was revoked" in worker.event("left")["reason"]
    assert worker.wait() == 1
    eventually(lambda: not pool.workers(), "the worker is gone")


def test_worker_may_offer_only_its_tokens_models(programs: Programs) -> None:
    pool = programs.serve()
    made = run_json(pool, "tokens", "create", "lab", "--models", "qwen*")

    worker = pool.join("lab", "--model", f"tiny={TINY}", token=made["token"])

    first = json.loads(worker.line() or "{}")  # before a model is loaded
    assert first["event"] == "refused"
    assert "not for this model" in first["reason"]


def test_killed_worker_rejoins_by_its_token(programs: Programs) -> None:
    pool = programs.serve()
    made = run_json(pool, "tokens", "create", "lab", "--uses", "1")
    worker = pool.join("lab", token=made["token"])
    worker.event("joined")

    pool.program.kill()
    again = programs.serve(port=pool.port)

    worker.event("joined")
    eventually(again.workers, "the worker is back")
    thief = again.join("thief", token=made["token"])
    assert "used by other workers" in thief.event("refused")["reason"]


def test_local_requests_may_be_anonymous_by_setting(programs: Programs) -> None:
    pool = programs.serve("--open-loopback")

    def status(**headers: str) -> int:
        request = Request(f"{pool.url}/v1/models", headers=headers)
        try:
            with urlopen(request, timeout=PATIENCE) as answer:
                return int(answer.status)
        except HTTPError as error:
            with error:
                return error.code

    assert status() == 200
    assert status(Authorization="Bearer sk-wrong") == 401
    assert status(Host="evil.example") == 401
    assert status(Origin="https://evil.example") == 401
