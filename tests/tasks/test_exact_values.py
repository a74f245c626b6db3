"""A value arrives as it left, or it is refused: beside pickle, for each kind."""

import datetime as dt
import enum
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import InvalidRequest
from shoal.tasks.json_calls import contents_as_json
from shoal.tasks.values import Form, ValueReader, load_pickle, mark_exact, pack
from tasks import values_of_classes as classes

BERLIN = ZoneInfo("Europe/Berlin")
ZONES = [None, dt.UTC, BERLIN, dt.timezone(dt.timedelta(hours=2), "X")]

floats = st.floats(allow_nan=False)
texts = st.text(max_size=8)
hashable = st.one_of(
    *(st.none(), st.booleans(), st.integers(), floats, texts, st.binary(max_size=8)),
    *(st.decimals(allow_nan=False), st.uuids(), st.dates(), st.timedeltas()),
    st.complex_numbers(allow_nan=False),
    st.datetimes(timezones=st.sampled_from(ZONES)),
    st.times(timezones=st.sampled_from([None, dt.UTC, ZONES[-1]])),
    st.sampled_from([BERLIN, ZONES[-1]]),
    st.sampled_from([*classes.Planet, *classes.Size]),
    st.integers(0, 3).map(classes.Mode),
    st.tuples(texts, st.integers()),
    st.frozensets(st.integers(), max_size=3),
)


def kinds_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return values that contain others."""
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(hashable, inner, max_size=3),
        st.dictionaries(texts, inner, max_size=3),
        st.sets(hashable, max_size=3),
        st.dictionaries(hashable, inner, max_size=3).map(OrderedDict),
        st.lists(hashable, max_size=3).map(Counter),
        st.dictionaries(texts, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.builds(classes.Angle, floats),
        st.builds(classes.Shape, texts, inner),
        st.builds(classes.Circle, texts, inner, inner),
        st.builds(classes.Frozen, inner),
        st.builds(classes.Scaled, st.integers(0, 9), st.integers(0, 9)),
        st.builds(classes.Mixed, inner),
        st.builds(classes.Doubled, inner),
        st.builds(classes.Fixed, inner),
        st.builds(classes.Pair, inner, inner),
        st.builds(classes.Price, cents=st.integers(0, 9), note=inner),
        st.builds(
            lambda secret, other: classes.Login.model_validate(
                {"password": secret, "userName": "u", "other": other}
            ),
            texts,
            inner,
        ),
        st.builds(classes.Outer.Inner, inner),
        st.binary(max_size=8).map(bytearray),
    )


anything = st.recursive(hashable, kinds_of, max_leaves=12)


def arrived(value: object, form: Form = Form.EXACT) -> Any:
    return ValueReader(unpickle=load_pickle).read(pack(value, form=form).data)


def types_in(value: Any) -> Any:
    """Return the types of a value's parts, which ``==`` does not compare."""
    if isinstance(value, dict):
        return type(value), [(types_in(k), types_in(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [types_in(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(types_in(each)) for each in value)
    if isinstance(value, dt.datetime | dt.time):
        return type(value), repr(value.tzinfo), value.fold
    state = getattr(value, "__dict__", None)
    if state and not isinstance(value, enum.Enum):
        return type(value), types_in(state)
    return type(value)


@pytest.mark.parametrize("form", [Form.EXACT, Form.PICKLED, Form.EXACT_OR_PICKLED])
@given(value=anything)
def test_any_value_arrives_as_it_left(form: Form, value: Any) -> None:
    read = arrived(value, form)

    assert read == value
    assert types_in(read) == types_in(value)


ALIKE: list[Any] = [
    dt.datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    dt.datetime(2026, 10, 25, 2, 30, fold=1),
    dt.time(2, 30, tzinfo=dt.UTC, fold=1),
    float("inf"),
    classes.Price(cents=3),
    classes.Mode.READ | classes.Mode.WRITE,
    pydantic.SecretStr("hunter2"),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b""),
    {"name\udcff": "\ud800", "big": 2**70},
    np.float32(1.5),
    np.arange(6.0).reshape(2, 3, order="F"),
    np.arange(24).reshape(2, 3, 4).transpose(2, 1, 0),
    np.arange(24)[::3],
    np.zeros((0, 3), order="F"),
]


@pytest.mark.parametrize("value", ALIKE, ids=repr)
def test_equal_values_are_not_told_apart(value: Any) -> None:
    read = arrived(value)

    assert types_in(read) == types_in(value)
    assert repr(read) == repr(value)
    if isinstance(value, np.ndarray):
        assert read.ravel(order="K").tolist() == value.ravel(order="A").tolist()
        assert read.dtype == value.dtype
        as_pickled = pickle.loads(pickle.dumps(value)).flags
        assert read.flags.f_contiguous == as_pickled.f_contiguous


def with_attribute() -> object:
    ordered = OrderedDict(a=1)
    ordered.origin = "here"  # type: ignore[attr-defined]
    return ordered


def local_class() -> object:
    return enum.Enum("Local", ["A"])["A"]  # type: ignore[index]


pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: np.matrix([[1]]), "matrix"),
    (lambda: np.ma.masked_array([1], [True]), "masked"),
    (lambda: np.zeros(2, [("a", "i4")]), "only plain numbers"),
    (lambda: np.array([None]), "only plain numbers"),
    (lambda: classes.Masked("secret"), "Masked"),
    (lambda: type("Integer", (int,), {})(3), "Integer"),
    (lambda: classes.Plain(), "Plain"),
    (lambda: defaultdict(lambda: 1), "defaultdict"),
    (with_attribute, "OrderedDict"),
    (lambda: memoryview(b"x"), "memoryview"),
    (lambda: classes.Shape, "type"),
    (lambda: ValueError("x"), "ValueError"),
    (local_class, "Local"),
    (lambda: classes.Shape("a", classes.Plain()), r"value\.parts: .*Plain"),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_other_values_are_refused_by_name(
    make: Callable[[], object], named: str
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        pack(make())


def test_where_code_is_trusted_others_are_pickled() -> None:
    for make, _ in REFUSED[:7]:
        value = make()
        read = arrived(value, Form.PICKLED)
        assert type(read) is type(value) or "Integer" in repr(type(value))
        assert repr(read)[:6] == repr(value)[:6]


def test_a_class_that_is_not_imported_is_not_looked_for() -> None:
    data = pack(classes.Shape("a")).data.replace(
        b"values_of_classes", b"values_of_clasXXX"
    )

    with pytest.raises(
        InvalidRequest, match=r"tasks\.values_of_clasXXX\.Shape.*import"
    ):
        ValueReader().read(data)


@pytest.mark.parametrize("name", [b"Plain", b"field", b"typed"])
def test_only_instances_of_data_classes_are_made(name: bytes) -> None:
    data = pack(classes.Shape("a")).data.replace(b"Shape", name)

    with pytest.raises(InvalidRequest):
        ValueReader().read(data)


def test_kinds_are_as_plain_as_they_were() -> None:
    assert pack([1, "a", 2.5, b"x", None, {"a": [True]}]).first_extension == ""
    assert pack(dt.datetime(2026, 1, 1, tzinfo=dt.UTC)).first_extension == ""
    for rich in (Decimal(1), UUID(int=1), (1, 2)):
        assert pack(rich).first_extension == "value"


def test_code_of_a_class_that_fails_is_a_refusal() -> None:
    data = pack(classes.Fragile(1)).data

    with pytest.raises(InvalidRequest):
        ValueReader().read(data)


SHOWN: list[tuple[object, bytes]] = [
    ([1, (2, "a")], b'[1,[2,"a"]]'),
    (classes.Circle("c", (1,)), b'{"name":"c","parts":[1],"radius":1.0}'),
    (classes.Pair(1, classes.Planet.EARTH), b'[1,"EARTH"]'),
    (
        [b"x", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)],
        b'["eA==","2026-01-01T00:00:00Z"]',
    ),
]


@pytest.mark.parametrize(("value", "shown"), SHOWN)
def test_contents_are_shown_in_json(value: object, shown: bytes) -> None:
    packed = pack(value).data

    assert contents_as_json(packed) == shown
    assert contents_as_json(mark_exact(packed)) == shown


@pytest.mark.parametrize(
    "value",
    [
        [1.0, float("nan")],
        {"a": (float("inf"),)},
        np.arange(3),
        pydantic.SecretStr("hunter2"),
        classes.Shape("s", pydantic.SecretBytes(b"hunter2")),
        classes.Price(cents=1),
        {1: 2},
    ],
    ids=repr,
)
def test_what_json_cannot_show_is_not_shown(value: object) -> None:
    with pytest.raises(InvalidRequest, match="has no JSON form"):
        contents_as_json(pack(value).data)
