"""Values in MessagePack: round trips, and errors that name the unsupported part."""

import datetime as dt
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from shoal.domain.errors import InvalidRequest, TooLarge
from shoal.tasks.limits import BLOB_MIN, DEPTH_MAX
from shoal.tasks.values import (
    Form,
    PackedValue,
    Ref,
    ValueReader,
    load_pickle,
    pack,
)

UTC_NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC)


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


class Pair(NamedTuple):
    x: int
    y: int


@dataclass
class Point:
    x: int
    tags: tuple[str, ...] = ()


class Struct(msgspec.Struct):
    point: Point


class Model(BaseModel):
    at: dt.date
    struct: dict[str, int]


PLAIN: list[tuple[object, object]] = [
    (None, None),
    ([True, 1, 1.5, "ü", b"\xff"], [True, 1, 1.5, "ü", b"\xff"]),
    ((1, (2, [3])), [1, [2, [3]]]),
    ({"a": {"b": [b""]}}, {"a": {"b": [b""]}}),
    (bytearray(b"x"), b"x"),
    (memoryview(b"x"), b"x"),
    (Colour.RED, "red"),
    (Size.BIG, 3),
    (Pair(1, 2), [1, 2]),
    (Point(1, ("a",)), {"x": 1, "tags": ["a"]}),
    (Struct(Point(2)), {"point": {"x": 2, "tags": []}}),
    (
        Model(at=dt.date(2026, 1, 2), struct={"a": 1}),
        {"at": "2026-01-02", "struct": {"a": 1}},
    ),
    (UTC_NOON, UTC_NOON),
    (np.str_("text"), "text"),
    (-(1 << 63), -(1 << 63)),
    ((1 << 64) - 1, (1 << 64) - 1),
]


@pytest.mark.parametrize(("value", "read"), PLAIN)
def test_plain_value_is_plain_messagepack(value: object, read: object) -> None:
    packed = pack(value, form=Form.CONTENTS)

    assert packed.first_extension == ""
    assert ValueReader().read(packed.data) == read
    assert msgpack.unpackb(packed.data, timestamp=3) == read


RICH: list[object] = [
    {1, 2},
    frozenset({"a", ("b", (1,))}),
    {1: "one", (2, 3): "pair"},
    1 << 64,
    -(1 << 100),
    [1, {"deep": -(1 << 80)}],
    3 + 4j,
    Decimal("1.50"),
    UUID(int=7),
    dt.date(2026, 1, 2),
    dt.time(3, 4, 5),
    dt.datetime(2026, 1, 2, 3),
    dt.timedelta(days=-1, microseconds=5),
]


@pytest.mark.parametrize("value", RICH)
def test_extension_values_round_trip(value: object) -> None:
    packed = pack(value)

    assert packed.first_extension != ""
    read = ValueReader().read(packed.data)
    assert read == value
    assert type(read) is type(value)


ARRAYS = [
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype="i2").reshape(2, 3)),
    np.arange(20)[::3],
    np.zeros((0, 3), "f4"),
    np.array(3, ">i8"),
    np.array(["a", "bcd"]),
    np.array(["2026-01-02"], "M8[D]"),
    np.array([1 + 2j], "c8"),
    np.array([True, False]),
    np.float32(1.5),
    np.int8(-3),
]


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [1, {"a": x}]])
def test_arrays_round_trip(array: Any, wrap: Callable[[Any], Any]) -> None:
    packed = pack(wrap(array))
    read = ValueReader().read(packed.data)
    read = read if packed.first_extension == "value" else read[1]["a"]

    assert packed.first_extension in ("value", "value[1].a")
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert (read == array).all()


def test_array_is_a_writable_view_of_its_data() -> None:
    data = bytearray(pack(np.zeros(1000)).data)
    array = ValueReader().read(data)
    array[0] = 1.0

    assert not array.flags.owndata
    assert array.flags.aligned
    assert ValueReader().read(data)[0] == 1.0


def test_array_of_a_blob_is_a_read_only_view() -> None:
    blob = pack([np.zeros(1000), "x"]).data
    array, _ = ValueReader(lambda digest: pack(np.ones(9)).data).read(
        pack([Ref(b"d" * 32), "x"]).data
    )

    assert len(blob) > 1000
    assert not array.flags.owndata
    assert not array.flags.writeable


REFUSED: list[tuple[object, str]] = [
    (lambda: 1, r"^args: a value of the type function cannot be sent"),
    ([0, {"k": [print]}], r"^args\[1\]\.k\[0\]: a value of the type "),
    ({"a b": object()}, r"^args\['a b'\]: a value of the type object"),
    (Point(object()), r"^args\.x: a value of the type object"),  # type: ignore[arg-type]  # on purpose
    (np.array([object()]), "^args: arrays of object"),
    ([np.zeros(2, "i4,f4")], r"^args\[0\]: arrays of"),
    (np.ma.masked_array([1.0], [True]), "masked"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_error_names_the_unsupported_value(value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack(value, "args")


def test_text_that_is_not_unicode_is_none_for_others() -> None:
    with pytest.raises(InvalidRequest, match=r"^args\.k: a text that is not Unicode"):
        pack({"k": "\ud800"}, "args", form=Form.CONTENTS)


def test_cyclic_value_is_rejected() -> None:
    cycle: list[object] = []
    cycle.append(cycle)

    with pytest.raises(InvalidRequest, match=f"more than {DEPTH_MAX} levels"):
        pack(cycle)


def test_oversized_value_is_rejected_with_its_size() -> None:
    with pytest.raises(TooLarge, match="args has 105 bytes, more than the limit of 99"):
        pack(b"x" * 103, "args", size_max=99)


def test_pickling_is_opt_in() -> None:
    packed = pack([Colour, 1], form=Form.EXACT_OR_PICKLED)

    assert packed.pickled
    assert packed.first_extension == "value[0]"
    assert ValueReader(unpickle=load_pickle).read(packed.data) == [Colour, 1]
    with pytest.raises(InvalidRequest, match=r"pickled.*--trust-code"):
        ValueReader().read(packed.data)


class Blobs(dict[bytes, bytes]):
    """Stores blobs by their digests."""

    def store(self, data: bytes) -> bytes:
        digest = hashlib.sha256(data).digest()
        self[digest] = data
        return digest


class Holder:
    """Something that can only be pickled."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays


@pytest.mark.parametrize("shared", [True, False])
def test_large_buffers_of_a_pickle_are_blobs_of_their_own(shared: bool) -> None:
    large, few = np.arange(1.0, 1 + BLOB_MIN).reshape(2, -1), np.arange(3)
    constant = large[::-1].copy()
    constant.flags.writeable = False
    arrays = (large, large.T, constant, large[:, :9:2], few)
    stored = Blobs()

    def pack_held(*held: Any) -> PackedValue:
        return pack([Holder(*held)], form=Form.PICKLED, store_blob=stored.store)

    packed = pack_held(*arrays)
    (holder,) = ValueReader(
        lambda each: stored[each] if shared else memoryview(bytearray(stored[each])),
        load_pickle,
    ).read(packed.data)
    count = len(stored)
    again = pack_held(*arrays[::-1])

    for sent, came in zip(arrays, holder.arrays, strict=True):
        assert np.array_equal(sent, came)
        assert (sent.dtype, sent.flags.writeable) == (came.dtype, came.flags.writeable)
        if sent.flags.forc:
            assert sent.strides == came.strides
    assert packed.pickled
    assert len(packed.data) < BLOB_MIN
    assert (len(stored), again.pickled) == (count, True)
    with pytest.raises(InvalidRequest, match=r"pickled.*--trust-code"):
        ValueReader(stored.__getitem__).read(packed.data)


def test_large_parts_become_blobs() -> None:
    stored = Blobs()
    value = {"a": np.ones(BLOB_MIN), "b": b"x" * BLOB_MIN, "c": b"small"}
    packed = pack(value, store_blob=stored.store)
    read = ValueReader(stored.__getitem__).read(packed.data)

    assert len(packed.data) < 200
    assert set(packed.blobs) == stored.keys()
    assert (read["a"] == value["a"]).all()
    assert (read["b"], read["c"]) == (value["b"], value["c"])


def extension(code: int, body: object) -> bytes:
    data: bytes = msgpack.packb(msgpack.ExtType(code, msgpack.packb(body)))
    return data


BROKEN = [
    b"",
    b"\xc1",
    b"\x01\x02",
    b"\x91" * 5000,
    extension(99, 1),
    extension(1, 5),
    extension(1, ["O", [1], b"12345678"]),
    extension(1, ["<f8", [2], b"12345678"]),
    extension(1, ["<f8", [-1], b"12345678"]),
    extension(1, ["<f8", [1 << 62, 8], b""]),
    extension(1, ["<f8", [0] * 70, b""]),
    extension(1, ["x" * 500, [1], b""]),
    extension(1, ["i4,i4", [1], b"12345678"]),
    extension(2, b"short"),
    extension(4, ["no such tag", 1]),
    extension(4, ["set", [{}]]),
    extension(4, ["set"]),
    extension(4, ["pickled", []]),
    extension(4, ["pickled", [5]]),
    extension(4, ["pickled", [b"x", 5]]),
    extension(4, ["date", "tomorrow"]),
    extension(4, ["int", 5]),
    extension(4, ["decimal", "x"]),
    extension(5, ["<f8", b"1"]),
    extension(5, ["O", b"12345678"]),
    extension(2, b"d" * 30),
]


@pytest.mark.parametrize("data", BROKEN)
def test_malformed_value_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        ValueReader().read(data)


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_rejected(data: bytes) -> None:
    with suppress(InvalidRequest):
        ValueReader().read(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.uuids()
    | st.sets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers(), inner)
    ),
    max_leaves=20,
)


@given(values)
def test_any_value_round_trips(value: object) -> None:
    assert ValueReader().read(pack(value).data) == value
