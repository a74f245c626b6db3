"""How a model is split over machines: its laws, and single rules."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.worker import LoadableModel, ModelLayers
from shoal.pool.models.split import ROUND_TRIP_MAX, Holder, ModelSplit, split_model

MB = 10**6
GB = 10**9

BIG = LoadableModel(
    *("big", 41 * GB),
    context=32_768,
    cache=160_000,
    layers=ModelLayers(((60, 650 * MB),), 2 * GB, 200_000, 600_000),
)


def place(
    name: str, memory: float, bandwidth: float = 100.0, away: float = 0
) -> Holder:
    return Holder(name, name, int(memory * GB), bandwidth, away)


def split(
    runner: Holder, *lenders: Holder, context: int = 4096, slots: int = 1
) -> ModelSplit | str:
    return split_model(BIG, context, slots, runner, lenders)


def layers_of(found: ModelSplit | str) -> list[tuple[str, int]]:
    assert isinstance(found, ModelSplit), found
    return [(each.machine, each.layers) for each in found.shards]


def begins_of(found: ModelSplit | str) -> list[int]:
    assert isinstance(found, ModelSplit), found
    return [each.first for each in found.shards]


def test_runner_has_the_first_layers_and_as_many_as_fit() -> None:
    found = layers_of(split(place("here", 12), place("anna", 24), place("ben", 16)))

    assert found == [("anna", 32), ("ben", 16), ("here", 12)]


def test_runner_with_a_gpu_has_the_last_layers() -> None:
    """The last ones are large: where the first ones would fit, none of them does."""
    uneven = LoadableModel(
        "m", 9 * GB, layers=ModelLayers(((8, GB // 2), (2, 5 * GB // 2)))
    )
    anna = place("anna", 8)
    first, last = (
        split_model(uneven, 1, 1, replace(here, holds_last=is_last), [anna])
        for here, is_last in ((place("here", 3), False), (place("here", 3), True))
    )

    assert layers_of(first) == [("anna", 5), ("here", 5)]
    assert layers_of(last) == [("anna", 9), ("here", 1)]
    assert begins_of(first) == [5, 0]
    assert begins_of(last) == [0, 9]


def test_fewest_machines_hold_it() -> None:
    many = [place(f"small {number}", 8) for number in range(9)]

    assert len(layers_of(split(place("here", 12), *many, place("large", 48)))) == 2


def test_quickest_machine_has_most_of_the_layers() -> None:
    slow, quick = place("slow", 30, 20.0), place("quick", 30, 400.0)

    (machine, most), (_, few), _ = layers_of(split(place("here", 6), slow, quick))

    assert machine == "quick"
    assert most > few


def test_machine_that_is_far_away_lends_nothing() -> None:
    near = place("near", 48)
    far = replace(near, id="far", name="far", round_trip=2 * ROUND_TRIP_MAX)

    assert layers_of(split(place("here", 12), far, near))[0][0] == "near"
    assert isinstance(split(place("here", 12), far), str)


def test_rate_of_the_links_says_how_long_layers_are_sent() -> None:
    here, anna, ben = place("here", 12), place("anna", 24), place("ben", 16)
    quick, slow = replace(anna, rate=130e6), replace(ben, rate=65e6)

    plain, partly, known = (
        split(here, anna, ben),
        split(here, quick, ben),
        split(here, quick, slow),
    )

    assert isinstance(known, ModelSplit)
    assert isinstance(partly, ModelSplit)
    assert isinstance(plain, ModelSplit)
    assert partly.load_seconds is plain.load_seconds is None
    # 32 layers of 650 MB to anna, and 16 to ben.
    assert known.load_seconds == 160.0 + 160.0
    assert known.seconds > plain.seconds


def test_context_and_slots_take_memory() -> None:
    machines = place("here", 12), place("anna", 40)

    assert isinstance(split(*machines), ModelSplit)
    assert split(*machines, context=32_768, slots=4) == (
        "needs 62.0 GB: here has 10.8 GB, those that lend have 36.0 GB (anna 36.0 GB)"
    )


def test_reads_smaller_batches_where_memory_is_small() -> None:
    found = [split(place("here", memory), place("anna", 48)) for memory in (20.0, 2.6)]

    assert [each.batch for each in found if isinstance(each, ModelSplit)] == [512, 64]


def test_shortage_is_explained_with_numbers() -> None:
    assert split(place("here", 12)) == "needs 41.7 GB: here has 10.8 GB, none lends"
    assert split(place("here", 1), place("anna", 99)) == (
        "needs 2.1 GB on the machine that runs it, and here has 900 MB"
    )
    lenders = place("anna", 4), place("ben", 8)
    for each in (lenders, lenders[::-1]):
        assert split(place("here", 12), *each) == (
            "needs 41.7 GB: here has 10.8 GB, those that lend have 10.8 GB (ben 7.2 "
            "GB, anna 3.6 GB)"
        )


def test_shortage_names_those_that_are_too_far_away() -> None:
    far = place("far", 99, away=1.25)
    assert split(place("here", 12), far) == (
        "needs 41.7 GB: here has 10.8 GB, far is 1.2 s away"
    )
    assert split(place("here", 12), far, place("ben", 8)) == (
        "needs 41.7 GB: here has 10.8 GB, those that lend have 7.2 GB (ben 7.2 GB), "
        "far is 1.2 s away"
    )


places = st.builds(
    Holder,
    id=st.sampled_from("abcdefgh"),
    name=st.just("x"),
    memory=st.integers(0, 60 * GB),
    bandwidth=st.sampled_from([0.0, 20.0, 100.0, 800.0]),
    round_trip=st.sampled_from([0.0, 0.001, 0.02, 1.0]),
    holds_last=st.booleans(),
)
models = st.builds(
    LoadableModel,
    name=st.just("m"),
    size=st.just(GB),
    cache=st.integers(0, 1 << 20),
    layers=st.builds(
        ModelLayers,
        runs=st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 3 * GB)),
            min_size=1,
            max_size=5,
        ).map(tuple),
        last=st.integers(0, 4 * GB),
        states=st.integers(0, 1 << 20),
        scores=st.integers(0, 1 << 20),
    ),
)


@given(
    models,
    st.integers(1, 8192),
    st.integers(1, 8),
    places,
    st.lists(places, max_size=7, unique_by=lambda each: each.id),
)
def test_no_machine_holds_more_than_it_may_and_each_layer_is_held_once(
    model: LoadableModel,
    context: int,
    slots: int,
    runner: Holder,
    lenders: list[Holder],
) -> None:
    found = split_model(model, context, slots, runner, lenders)

    assert found == split_model(model, context, slots, runner, lenders[::-1])
    if isinstance(found, str):
        return
    assert model.layers is not None
    by_id = {each.id: each for each in lenders} | {runner.id: runner}
    held = [each.machine for each in found.shards]
    assert len({*held}) == len(held) > 1
    assert held[-1] == runner.id
    assert sum(each.layers for each in found.shards) == len(model.layers.sizes)
    first = 0
    *lent, runs = found.shards
    for shard in (*lent, runs) if runner.holds_last else (runs, *lent):
        assert shard.first == first
        own = model.layers.sizes[first : first + shard.layers]
        first += shard.layers
        assert sum(own) <= shard.memory <= by_id[shard.machine].room
        assert shard.layers or shard.machine == runner.id
        assert by_id[shard.machine].round_trip <= ROUND_TRIP_MAX or (
            shard.machine == runner.id
        )
