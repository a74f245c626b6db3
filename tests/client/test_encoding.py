"""Encoding of functions and arguments."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from shoal.client.encoding import encode_arguments, is_small, remote_function
from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.tasks.registry import TASKS, main_module_name, task
from shoal.tasks.values import Ref, ValueReader, load_pickle, pack
from tasks import demo_tasks

named = remote_function("some", trust=False)


@pytest.mark.parametrize("args", [(), (1, 2.5, "x", None, True), ([1], {"a": b"x"})])
def test_plain_arguments_need_no_feature(args: tuple[object, ...]) -> None:
    parcel = encode_arguments(named, args, {"k": 1})

    assert msgspec.msgpack.decode(parcel.args) == [*args]
    assert msgspec.msgpack.decode(parcel.kwargs) == {"k": 1}
    assert not parcel.needs
    assert not parcel.digests


def test_arrays_need_the_values_feature() -> None:
    assert encode_arguments(named, (np.ones(3),), {}).needs == ("values",)


def test_large_array_becomes_a_blob() -> None:
    parcel = encode_arguments(named, (np.ones(100_000), 1), {})

    assert len(parcel.args) < 100
    assert [blob.digest for blob in parcel.blobs] == [*parcel.digests]
    blobs = {blob.digest: b"".join(blob.pieces) for blob in parcel.blobs}
    array, one = ValueReader(blobs.__getitem__).read(parcel.args)
    assert array.sum() == 100_000
    assert one == 1


def test_put_value_is_sent_by_reference() -> None:
    ref = Ref(bytes(32))

    parcel = encode_arguments(named, ([ref],), {})

    assert parcel.digests == (ref.digest,)
    assert parcel.blobs == ()


@pytest.mark.parametrize("others", [0, 1, 14, 15, 16, 65_534, 65_535, 65_536])
def test_function_is_prepended_to_any_number_of_arguments(others: int) -> None:
    coded = remote_function(lambda *args: len(args), trust=False)

    parcel = encode_arguments(coded, range(others), {})

    function, *args = ValueReader(unpickle=load_pickle).read(parcel.args)
    assert function(*args) == others
    assert parcel.needs == ("code",)


def test_large_function_becomes_a_blob() -> None:
    much = "x" * 1_000_000
    coded = remote_function(lambda: len(much), trust=False)

    parcel = encode_arguments(coded, (), {})

    blobs = {blob.digest: b"".join(blob.pieces) for blob in parcel.blobs}
    assert blobs.keys() == {*parcel.digests}
    (function,) = ValueReader(blobs.__getitem__, load_pickle).read(parcel.args)
    assert function() == 1_000_000


def test_task_is_called_by_name() -> None:
    function = remote_function(demo_tasks.add, trust=False)

    assert (function.name, function.code) == ("demo.add", b"")


def test_uncallable_object_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"^3 cannot be called: give a function"):
        remote_function(3, trust=False)  # type: ignore[arg-type]  # that is the point


def test_unpicklable_function_error_has_the_reason() -> None:
    import threading

    lock = threading.Lock()

    with pytest.raises(
        InvalidRequest, match="an object that it refers to cannot be pickled"
    ):
        remote_function(lambda: lock, trust=False)


def test_oversized_arguments_are_rejected() -> None:
    text = "x" * (40 << 20)  # a text is never sent apart

    with pytest.raises(TooLarge):
        encode_arguments(named, (text,), {"more": text})


@pytest.mark.parametrize(
    ("value", "small"),
    [
        (1, True),
        (["x", {"a": 1.0}], True),
        ("x" * 100_000, False),
        ([0] * 100, False),
        ([[[[[1]]]]], False),
        (np.ones(1), False),
    ],
)
def test_only_small_values_are_encoded_on_the_loop(value: object, small: bool) -> None:
    assert is_small(value) is small


@dataclass(frozen=True)
class Point:
    x: int
    y: int


@task(name="client.mirror")
def mirror(point: Point) -> list[Point]:
    return [Point(point.y, point.x)]


def test_result_is_converted_to_its_hint() -> None:
    function = remote_function(mirror, trust=False)

    assert function.read(pack([{"x": 1, "y": 2}]).data) == [Point(1, 2)]
    with pytest.raises(InvalidRequest, match=r"client\.mirror returned"):
        function.read(pack([{"x": 1}]).data)


def test_result_of_a_task_that_is_sent_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair() -> tuple[int, int]:
        return 1, 2

    monkeypatch.setattr(pair, "__module__", "__main__")
    monkeypatch.setattr(pair, "__qualname__", "pair")
    name = f"{main_module_name()}.pair"
    try:
        function = remote_function(task(pair), trust=False)
        # At once if the program is no file.
        sent = function if function.as_code is None else function.as_code()
        assert sent.code
        assert sent.read(pack([1, 2]).data) == [1, 2]
    finally:
        TASKS.pop(name, None)
