"""Names that stand for models: aliases, each with the models to try in order."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shoal.domain.facts import AliasRemoved, AliasSet
from shoal.domain.work import Inference, Work
from shoal.pool.state import PoolState
from shoal.pool.worker import Worker

ALIASES_MAX = 1000
MODELS_MAX = 16  # of one alias
NAME_MAX = 256  # characters, as of a model's name in a request
ANY = "*"  # in a pattern: any characters
"""What an alias's name may have once, to stand for any characters."""


def alias_rejection(pool: PoolState, name: str, models: Sequence[str]) -> str | None:
    """Return why ``name`` cannot stand for ``models``, or None.

    An alias of an alias would hide which models a request may get, so there is none.
    """
    if (reason := name_rejection(name)) is not None:
        return reason
    if name.count(ANY) > 1 or name == ANY:
        return f"{name}: a pattern has one * and other characters, such as claude-*"
    if not models:
        return f"{name}: name at least one model that it stands for"
    if len(models) > MODELS_MAX:
        return f"{name}: {len(models)} models, and at most {MODELS_MAX} are possible"
    for model in models:
        if (reason := name_rejection(model)) is not None:
            return reason
        if ANY in model:
            return f"{model}: only the name of an alias is a pattern, not a model's"
        if model == name:
            return f"{name}: it cannot stand for itself; name other models"
        if models.count(model) > 1:
            return f"{model}: named more than once"
        if model in pool.aliases and model not in pool.roster:
            return f"{model} is an alias itself: name the models that it stands for"
    if name not in pool.aliases and len(pool.aliases) >= ALIASES_MAX:
        return f"there are {ALIASES_MAX} aliases already: remove some first"
    return None


def name_rejection(name: str) -> str | None:
    """Return why an alias or a model cannot have a name, or None."""
    if not name or len(name) > NAME_MAX:
        return f"{name[:80]!r}: a name has 1 to {NAME_MAX} characters"
    if not name.isprintable() or " " in name or "," in name:
        return f"{name[:80]!r}: a name has no spaces, commas or control characters"
    return None


def real_model(
    pool: PoolState,
    name: str,
    owner: str | None,
    work: Work | None,
    *,
    hosted: bool = False,
) -> str:
    """Return the model that a request for ``name`` gets now.

    That is the name itself unless it is only an alias.  Of an alias's models it is the
    first that a worker serves now that does such work for ``owner`` (None: anybody),
    else one that a machine can load, else one of a hosted provider if ``hosted`` is
    set, else one that is connected, else the one that was there last, else the first.
    """
    if name in pool.roster or not (alias := alias_of(pool, name)):
        return name
    ranked = [
        (_rank(pool, model, owner, work, hosted=hosted), model)
        for model in alias.models
    ]
    return min(ranked, key=lambda each: each[0])[1]  # the first of equals


def alias_of(pool: PoolState, name: str) -> AliasSet | None:
    """Return the alias of a name, or the pattern that matches the most of it."""
    if (exact := pool.aliases.get(name)) is not None:
        return exact
    matching = [each for each in pool.aliases.values() if _matches(each.name, name)]
    return max(matching, key=lambda each: (len(each.name), each.name), default=None)


def served_aliases(pool: PoolState, owner: str | None) -> Iterator[tuple[str, str]]:
    """Yield the aliases that a model is served for now, each with that model.

    Not the patterns, and not what a model of the same name hides.
    """
    for name, alias in pool.aliases.items():
        if ANY not in name and (model := served_model(pool, alias, owner)) is not None:
            yield name, model


def served_model(pool: PoolState, alias: AliasSet, owner: str | None) -> str | None:
    """Return the model that an alias gets if it is served, or can be loaded."""
    if alias.name in pool.roster:
        return None
    ranked = [(_rank(pool, model, owner, None)[0], model) for model in alias.models]
    rank, model = min(ranked, key=lambda each: each[0])  # the first of equals
    return model if rank <= LOADABLE else None


def with_real_model(
    pool: PoolState, work: Work, owner: str, *, hosted: bool = False
) -> Work:
    """Return work with the model that its alias stands for; else as it is.

    ``hosted``: whether a hosted provider may do it.
    """
    if not pool.aliases or not isinstance(work, Inference):
        return work
    model = real_model(pool, work.model, owner, work, hosted=hosted)
    return work if model == work.model else replace(work, model=model)


def unknown_alias(pool: PoolState, name: str) -> str | None:
    """Return an error text for an alias without a worker; None: it is no alias."""
    if (alias := alias_of(pool, name)) is None:
        return None
    return (
        f"no worker has a model that {name} stands for ({', '.join(alias.models)}): "
        "offer one with `shoal join`, or change it with `shoal models alias set`"
    )


SERVED, LOADABLE, HOSTED, PAUSED, UNABLE, ABSENT = range(6)


def _rank(
    pool: PoolState,
    model: str,
    owner: str | None,
    work: Work | None,
    *,
    hosted: bool = False,
) -> tuple[int, float]:
    """Return how well a model serves: the less, the better."""
    workers = pool.roster.with_model.get(model)
    if not workers and _can_load(pool, model, owner, work):
        return LOADABLE, 0.0
    providers = pool.roster.hosted.get(model, {}).values() if hosted else ()
    remote = any(each.accepts_jobs and _can_do(each, owner, work) for each in providers)
    if not workers:
        if remote:
            return HOSTED, 0.0
        return ABSENT, -pool.roster.models_last_seen.get(model, float("-inf"))
    best = HOSTED if remote else UNABLE
    for worker in workers.values():
        if _can_do(worker, owner, work):
            if worker.accepts_jobs:
                return SERVED, 0.0
            best = min(best, PAUSED)
    return best, 0.0


def _can_load(
    pool: PoolState, model: str, owner: str | None, work: Work | None
) -> bool:
    for worker_id, known in pool.roster.loadable.get(model, {}).items():
        only_for = pool.workers[worker_id].offer.only_for
        if owner is not None and only_for and owner not in only_for:
            continue
        if work is None or (work.kind in known.kinds and work.needs <= known.features):
            return True
    return False


def _can_do(worker: Worker, owner: str | None, work: Work | None) -> bool:
    offer = worker.offer
    if owner is not None and offer.only_for and owner not in offer.only_for:
        return False
    return work is None or (work.kind in offer.kinds and work.needs <= offer.features)


def _matches(pattern: str, name: str) -> bool:
    head, star, tail = pattern.partition(ANY)
    return (
        bool(star)
        and len(name) >= len(head) + len(tail)
        and name.startswith(head)
        and name.endswith(tail)
    )


def alias_facts(
    pool: PoolState, name: str, models: Sequence[str], by: str
) -> list[AliasSet | AliasRemoved]:
    """Return what setting an alias changes; without models, it is removed."""
    known = pool.aliases.get(name)
    if not models:
        return [AliasRemoved(name, by)] if known is not None else []
    if known is not None and known.models == tuple(models):
        return []
    return [AliasSet(name, tuple(models), by)]
