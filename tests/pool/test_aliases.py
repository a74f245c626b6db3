"""Which model an alias stands for, and which aliases there may be."""

import pytest
from msgspec.structs import replace

from pool.builders import chat, job, joined, pool_after
from shoal.domain.errors import UnknownModel
from shoal.domain.facts import (
    AliasRemoved,
    AliasSet,
    JobSubmitted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from shoal.domain.ids import WorkerId
from shoal.domain.job import JobTerms
from shoal.domain.money import Micros
from shoal.domain.work import ANY_MODEL, JobKind, Task
from shoal.domain.worker import TokenPrices
from shoal.pool.explanation import explain_fact
from shoal.pool.inputs import AliasOrder
from shoal.pool.job_admission import permanent_rejection
from shoal.pool.models.aliases import (
    ALIASES_MAX,
    MODELS_MAX,
    NAME_MAX,
    alias_rejection,
    real_model,
    served_aliases,
    with_real_model,
)
from shoal.pool.react import react
from shoal.pool.state import PoolState

GPT = AliasSet("gpt", ("a", "b"), "al")
EMBEDS = frozenset({JobKind.EMBEDDING})


def given(pool: PoolState, name: str = "gpt", owner: str = "") -> str:
    return real_model(pool, name, owner, chat(name))


@pytest.mark.parametrize(
    ("workers", "model"),
    [
        ([joined("v", "a"), joined("w", "b")], "a"),
        ([joined("w", "b")], "b"),
        ([joined("v", "a"), joined("w", "b"), WorkerDraining(WorkerId("v"), "")], "b"),
        ([joined("v", "a", kinds=EMBEDS), joined("w", "b")], "b"),
        ([joined("v", "a", only_for=frozenset({"bo"})), joined("w", "b")], "b"),
        # None serves now: one that may again, else that which was there last.
        ([joined("w", "b"), WorkerDraining(WorkerId("w"), "")], "b"),
        ([joined("w", "b"), WorkerLeft(WorkerId("w"), "")], "b"),
        ([], "a"),
        # A model of the name wins.
        ([joined("v", "a"), joined("w", "gpt")], "gpt"),
    ],
)
def test_first_model_that_can_be_served_is_given(
    workers: list[WorkerJoined | WorkerDraining | WorkerLeft], model: str
) -> None:
    assert given(pool_after(GPT, *workers)) == model


def hosted(name: str, model: str) -> WorkerJoined:
    machine = joined(name, model)
    prices = TokenPrices(Micros(1), Micros(2))
    return replace(machine, offer=replace(machine.offer, last_resort=prices))


@pytest.mark.parametrize(
    ("workers", "model"),
    [
        ([hosted("h", "b")], "b"),
        ([joined("v", "a"), hosted("h", "b")], "a"),
        ([hosted("h", "a"), joined("w", "b")], "b"),
        ([joined("v", "a"), WorkerDraining(WorkerId("v"), ""), hosted("h", "b")], "b"),
        ([joined("v", "a"), WorkerDraining(WorkerId("v"), ""), hosted("h", "a")], "a"),
        ([hosted("h", "b"), WorkerDraining(WorkerId("h"), "")], "a"),
    ],
)
def test_model_of_a_provider_comes_after_those_of_machines(
    workers: list[WorkerJoined | WorkerDraining], model: str
) -> None:
    pool = pool_after(GPT, *workers)

    assert real_model(pool, "gpt", "", chat("gpt"), hosted=True) == model
    assert given(pool) == ("b" if joined("w", "b") in workers else "a")


def test_name_that_is_no_alias_is_itself() -> None:
    pool = pool_after(GPT, joined("w", "a"))

    assert given(pool, "gpt-4") == "gpt-4"
    pool.apply(AliasRemoved("gpt", "al"), 0.0)
    assert given(pool) == "gpt"


def test_pattern_that_matches_the_most_is_given() -> None:
    exact = AliasSet("claude-x-1", ("c",), "al")
    patterns = [
        AliasSet(name, (model,), "al")
        for name, model in [("claude-*", "a"), ("claude-x*", "b"), ("*-latest", "d")]
    ]
    pool = pool_after(exact, *patterns, joined("w", "a", "b", "c", "d"))

    asked = ["claude-", "claude-y", "claude-x", "claude-x-1", "o-latest", "claude"]
    assert [given(pool, name) for name in asked] == ["a", "a", "b", "c", "d", "claude"]


def test_ends_of_a_pattern_do_not_overlap() -> None:
    pool = pool_after(AliasSet("aba*aba", ("m",), "al"), joined("w", "m"))

    assert given(pool, "ababa") == "ababa"
    assert given(pool, "abaaba") == "m"


def test_work_without_a_model_of_its_own_is_left_alone() -> None:
    pool = pool_after(AliasSet("*task", ("m",), "al"), joined("w", "m"))

    for work in (Task("t"), chat(ANY_MODEL)):
        assert with_real_model(pool, work, "") is work


def test_aliases_that_are_served_now_are_listed() -> None:
    pool = pool_after(
        GPT,
        AliasSet("hidden", ("a",), "al"),
        AliasSet("absent", ("z",), "al"),
        AliasSet("any-*", ("a",), "al"),
        joined("v", "b", only_for=frozenset({"bo"})),
        joined("w", "hidden"),
    )

    assert list(served_aliases(pool, "bo")) == [("gpt", "b")]
    assert list(served_aliases(pool, None)) == [("gpt", "b")]
    assert list(served_aliases(pool, "al")) == []


def test_alias_of_models_that_nobody_has_is_refused_with_their_names() -> None:
    pool = pool_after(GPT, joined("w", "other"))
    asked = replace(job("j", "a"), terms=JobTerms(alias="gpt"))

    error = permanent_rejection(pool, asked, 0.0)

    assert isinstance(error, UnknownModel)
    assert "no worker has a model that gpt stands for (a, b)" in str(error)
    pool.apply(AliasRemoved("gpt", "al"), 0.0)
    assert "model a: the pool has other" in str(permanent_rejection(pool, asked, 0.0))


LONG = "x" * NAME_MAX


@pytest.mark.parametrize(
    ("name", "models", "said"),
    [
        ("new", ["a"], None),
        ("claude-*", ["org/a:q8"], None),
        (LONG, [LONG[1:]], None),
        ("new", [], "at least one model"),
        ("", ["a"], "1 to 256 characters"),
        (LONG + "x", ["a"], "1 to 256 characters"),
        ("a b", ["a"], "no spaces, commas or control characters"),
        ("a,b", ["a"], "no spaces, commas or control characters"),
        ("a\n", ["a"], "no spaces, commas or control characters"),
        ("a\u2028", ["a"], "no spaces, commas or control characters"),
        ("new", ["a\x00"], "no spaces, commas or control characters"),
        ("new", ["a", ""], "1 to 256 characters"),
        ("*", ["a"], "a pattern has one *"),
        ("a*b*", ["a"], "a pattern has one *"),
        ("new", ["a*"], "only the name of an alias is a pattern"),
        ("new", ["new"], "it cannot stand for itself"),
        ("new", ["a", "b", "a"], "named more than once"),
        ("new", ["a", "gpt"], "gpt is an alias itself"),
        ("new", [f"m{n}" for n in range(MODELS_MAX)], None),
        ("new", [f"m{n}" for n in range(MODELS_MAX + 1)], "at most 16"),
    ],
)
def test_aliases_that_make_no_sense_are_refused(
    name: str, models: list[str], said: str | None
) -> None:
    reason = alias_rejection(pool_after(GPT), name, models)

    assert (reason is None) if said is None else (said in (reason or ""))


def test_alias_may_stand_for_a_model_that_hides_another_alias() -> None:
    pool = pool_after(GPT, joined("w", "gpt"))

    assert alias_rejection(pool, "new", ["gpt"]) is None


def test_number_of_aliases_is_bounded() -> None:
    pool = pool_after(*(AliasSet(f"x{n}", ("m",), "al") for n in range(ALIASES_MAX)))

    assert "1000 aliases already" in (alias_rejection(pool, "new", ["m"]) or "")
    assert alias_rejection(pool, "x0", ["n"]) is None


def test_only_changes_are_facts() -> None:
    pool = pool_after()
    order = AliasOrder("gpt", ("a", "b"), "al")

    assert react(pool, replace(order, models=())) == []
    assert react(pool, order) == [GPT]
    pool.apply(GPT, 0.0)
    assert react(pool, order) == []
    assert react(pool, replace(order, models=())) == [AliasRemoved("gpt", "al")]


def test_history_says_what_was_asked_for() -> None:
    asked = replace(job("j", "a", owner="al"), terms=JobTerms(alias="gpt"))

    line = "submitted by al for a, requested as gpt"
    assert explain_fact(JobSubmitted(asked)) == line
    assert explain_fact(GPT) == "alias gpt set by al: a, b"
    assert explain_fact(AliasRemoved("gpt", "bo")) == "alias gpt removed by bo"
