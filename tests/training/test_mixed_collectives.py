"""The exchanges of recorded groups, byte for byte."""

from typing import Any

import numpy as np
import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import PeerError
from shoal.protocols import discover
from shoal.training.collectives import Place
from shoal.training.mixed_group import (
    MixedOperation,
    all_reduce,
    broadcast,
    gather,
    scatter,
)
from training.in_memory import Array, run_mixed


def wire() -> Any:
    return next(each.mixed_ranks() for each in discover().values() if each.mixed_ranks)


def array_of(recorded: dict[str, Any]) -> Array:
    data = bytes.fromhex(recorded["data_hex"])
    return np.frombuffer(data, recorded["dtype"]).reshape(recorded["shape"])


def operation(case: dict[str, Any], place: Place, array: Array) -> MixedOperation:
    match case["collective"]:
        case "allreduce":
            return all_reduce(place, array, case["op"])
        case "broadcast":
            return broadcast(place, array, case["root"])
        case "gather":
            return gather(place, array, case["root"])
        case _:
            assert case["collective"] == "scatter"
            return scatter(place, array, case["root"])


def frames(sent: list[tuple[int, Array]]) -> list[dict[str, Any]]:
    return [
        {"to": to, "wire_hex": b"".join(wire().encode_array(array)).hex()}
        for to, array in sent
    ]


@recorded("collective")
def test_ranks_send_what_other_programs_sent(case: Case) -> None:
    given, expected = case["input"], case["expect"]
    arrays = [array_of(each) for each in given["inputs"]]
    size = given["world_size"]

    results, sent = run_mixed(
        [operation(given, Place(rank, size), arrays[rank]) for rank in range(size)]
    )

    for rank in range(size):
        by_receiver = expected["frames_sent_by_rank"][str(rank)]
        assert frames(sent[rank]) == by_receiver
        due = expected["results"][rank]
        if due is not None:
            wanted = array_of(due)
            assert results[rank].dtype == wanted.dtype
            assert results[rank].shape == wanted.shape
            assert results[rank].tobytes() == wanted.tobytes()


@recorded("data_parallel")
def test_training_begins_and_steps_as_in_other_programs(case: Case) -> None:
    given, expected = case["input"], case["expect"]
    size = given["world_size"]
    parameters = [
        np.frombuffer(bytes.fromhex(each), np.float32)
        for each in given["params_f32le_hex"]
    ]
    gradients = [
        np.frombuffer(bytes.fromhex(each), np.float32)
        for each in given["grads_f32le_hex"]
    ]

    def setup(place: Place) -> MixedOperation:
        count = np.array([parameters[place.rank].size], np.float64)
        yield from gather(place, count, 0)
        yield from all_reduce(place, count, "sum")
        return (yield from broadcast(place, parameters[place.rank], 0))

    begun, setup_sent = run_mixed([setup(Place(rank, size)) for rank in range(size)])
    _, step_sent = run_mixed(
        [all_reduce(Place(rank, size), gradients[rank], "mean") for rank in range(size)]
    )

    for rank in range(size):
        assert np.array_equal(begun[rank], parameters[0])
        assert frames(setup_sent[rank]) == expected["setup_frames_by_rank"][str(rank)]
        assert frames(step_sent[rank]) == expected["step_frames_by_rank"][str(rank)]


@pytest.mark.parametrize(
    "sent", [np.zeros(3, np.float64), np.zeros(4, np.float32), np.zeros((1, 3), "f4")]
)
def test_an_array_that_is_not_due_ends_the_operation(sent: Array) -> None:
    exchange = all_reduce(Place(0, 2), np.zeros(3, np.float32), "mean")
    next(exchange)

    with pytest.raises(PeerError, match="its program is at another operation"):
        exchange.send(sent)


@pytest.mark.parametrize("size", [2, 3])
def test_arrays_may_have_another_order_of_bytes(size: int) -> None:
    arrays = [np.arange(5, dtype=">f4") + rank for rank in range(size)]

    results, _ = run_mixed(
        [all_reduce(Place(rank, size), arrays[rank], "sum") for rank in range(size)]
    )

    for result in results:
        assert result.tolist() == np.sum(arrays, axis=0).tolist()
