"""Pools that join each other on Shoal's own wire, over their HTTP ports."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from live.programs import KEY, TINY, Pool, Programs, answer_to, eventually, text_in
from models.tiny_answers import ANSWERS

PASSCODE = ("--shoal-passcode", "reef-passcode-4f61")
PLAIN = ("--no-discovery",)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Programs]:
    running = Programs(tmp_path / "other")
    yield running
    running.close()


def models(pool: Pool) -> set[str]:
    with pool.client() as client:
        return {each.id for each in client.models.list()}


def ask(pool: Pool, model: str, question: str = "ping") -> str:
    with pool.client() as client, answer_to(client, question, model) as stream:
        return "".join(text_in(stream))


def has_both(pool: Pool) -> bool:
    return models(pool) == {"tiny", "twin"}


def peers(pool: Pool) -> list[Any]:
    return [each for each in pool.workers() if each["id"].startswith("shoal:p")]


def test_two_pools_use_each_others_models(programs: Programs, others: Programs) -> None:
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN)
    flags = (*PASSCODE, *PLAIN, "--shoal-peers", one.url)
    other = others.serve("--name", "pool-2", *flags)
    one.joined("tiny-worker", "--model", f"tiny={TINY}")
    other.joined("twin-worker", "--model", f"twin={TINY}")

    for pool in (one, other):
        eventually(partial(has_both, pool), "it has both")
        for model in ("tiny", "twin"):
            assert ask(pool, model) == ANSWERS["ping"]
    (seen,) = peers(one)
    assert (seen["id"], seen["protection"]) == ("shoal:pool-2/twin", "noise")


def test_a_pool_that_proves_the_passcode_may_have_any_certificate(
    programs: Programs, others: Programs
) -> None:
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN, "--tls", "auto")
    assert one.url.startswith("https://")
    other = others.serve(
        "--name", "pool-2", *PASSCODE, *PLAIN, "--shoal-peers", one.url
    )
    token = one.ready["join"].rpartition("--token ")[2].split()[0]
    one.join("tiny-worker", "--model", f"tiny={TINY}", token=token).event("joined")

    eventually(lambda: models(other) == {"tiny"}, "it has the other's model")
    assert ask(other, "tiny") == ANSWERS["ping"]


def test_a_pool_named_without_its_wire_is_met_on_its_own(
    programs: Programs, others: Programs
) -> None:
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN)
    other = others.serve(
        *("--name", "pool-2", *PASSCODE, *PLAIN),
        *("--peer", f"127.0.0.1:{one.port}"),
    )
    other.joined("twin-worker", "--model", f"twin={TINY}")

    eventually(lambda: models(one) == {"twin"}, "they have met")


def test_another_passcode_is_told_and_nothing_is_shared(
    programs: Programs, others: Programs
) -> None:
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN)
    other = others.serve(
        *("--name", "pool-2", "--shoal-passcode", "another-passcode-77", *PLAIN),
        *("--shoal-peers", one.url, "--log-level", "info"),
    )

    eventually(lambda: "Invalid token" in other.program.errors, "it is refused")
    assert not peers(one)


def test_a_pool_that_restarts_comes_back(programs: Programs, others: Programs) -> None:
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN)
    other = others.serve(
        "--name", "pool-2", *PASSCODE, *PLAIN, "--shoal-peers", one.url
    )
    one.joined("tiny-worker", "--model", f"tiny={TINY}")
    eventually(lambda: models(other) == {"tiny"}, "they have met")

    one.program.kill()
    eventually(lambda: not models(other), "it is lost")
    programs.serve("--name", "pool-1", *PASSCODE, *PLAIN, port=one.port)

    eventually(lambda: models(other) == {"tiny"}, "it is back")


def test_a_model_is_copied_from_a_pool_that_another_found(
    programs: Programs, others: Programs
) -> None:
    shared = ("--share", f"reef={TINY}")
    one = programs.serve("--name", "pool-1", *PASSCODE, *PLAIN, *shared)
    other = others.serve(
        "--name", "pool-2", *PASSCODE, *PLAIN, "--shoal-peers", one.url
    )

    def hint() -> str:
        find = others.run(
            *("models", "find", "reef", "--url", other.url, "--api-key", KEY)
        )
        lines = [*iter(find.line, None)]
        return lines[-1].rstrip()

    told = f"to copy it: shoal models get reef --from {one.url} --passcode PASSCODE"
    eventually(lambda: hint() == told, "it is found")
    get = others.run(
        *("models", "get", "reef", "--from", one.url, "--passcode", PASSCODE[1]),
        *("--to", str(others.folder / "ours")),
    )

    assert get.wait() == 0, get.errors
