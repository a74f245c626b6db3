"""Errors of calls, and the exceptions of their functions, as Python raises them."""

import dataclasses
import json
import platform
import sys
from pathlib import Path

import msgspec
import numpy as np
import pydantic
import pytest

from shoal.client.errors import RemoteTraceback, TaskError
from shoal.client.remote_exceptions import home_module, rebuild_exception
from shoal.domain.errors import InvalidRequest, TooManyFailures
from shoal.tasks.errors import format_task_error
from shoal.tasks.exception_record import (
    ExceptionRecord,
    encode_exception,
)
from shoal.tasks.values import pack
from tasks import demo_tasks


def test_home_module_follows_the_function_or_its_name() -> None:
    assert home_module("demo.add", demo_tasks.add) == demo_tasks.__name__
    assert (
        home_module(f"{__name__}.test_home_module_follows_the_function_or_its_name")
        == __name__
    )
    assert home_module(f"{__name__}.nothing") == ""
    assert home_module("add") == ""


STACK = """Traceback (most recent call last):
  File "work.py", line 3, in work
    raise it
"""


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ("ValueError: zap", ValueError("zap")),
        ("ValueError: two\nlines", ValueError("two\nlines")),
        ("ValueError", ValueError()),
        ("KeyError: 'zap'", KeyError("zap")),
        ("KeyError: (1, 2)", KeyError((1, 2))),
        ("KeyError: <object>", KeyError("<object>")),
        ("FileNotFoundError: [Errno 2] No such file", FileNotFoundError),
        ("shoal.domain.errors.InvalidRequest: no", InvalidRequest("no")),
        ("UserWarning: odd", UserWarning("odd")),
    ],
)
def test_builtin_and_shoal_exceptions_are_rebuilt(
    last: str, error: Exception | type[Exception]
) -> None:
    built = rebuild_exception(STACK + last)

    if isinstance(error, Exception):
        assert type(built) is type(error)
        assert built.args == error.args
    else:
        assert type(built) is error


@pytest.mark.parametrize(
    "last",
    [
        "sums.OwnError: zap",
        "os.system: ls",
        "SystemExit: 1",
        "KeyboardInterrupt",
        "StopIteration: 1",
        "UnicodeDecodeError: 'utf-8' codec can't decode",
        "ExceptionGroup: many (2 sub-exceptions)",
        "shoal.domain.errors.Cancelled.mro: x",
        "shoal.domain.errors.__builtins__: x",
        "print: x",
        "not an exception at all",
    ],
)
def test_other_exceptions_become_task_errors(last: str) -> None:
    built = rebuild_exception(STACK + last, "job1")

    assert type(built) is TaskError
    assert str(built) == last
    assert built.traceback == STACK + last
    assert built.job_id == "job1"


def test_last_chained_traceback_counts() -> None:
    chained = (
        f"{STACK}KeyError: 1\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{STACK}TypeError: zap\n"
    )

    assert type(rebuild_exception(chained)) is TypeError


def test_cause_shows_the_remote_traceback() -> None:
    text = f"{STACK}ValueError: zap"

    built = rebuild_exception(text)

    assert isinstance(built.__cause__, RemoteTraceback)
    assert text in str(built.__cause__)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):\n", "\n\n"])
def test_traceback_without_a_message_is_an_error(text: str) -> None:
    assert isinstance(rebuild_exception(text), TaskError)


class OwnError(Exception):
    """Its constructor takes other arguments than its text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OwnOSError(OSError):
    """A subclass of a builtin with its own ``__new__``."""


class OwnStop(StopIteration):
    """An exception that a future cannot raise."""


def test_exception_of_an_imported_module_is_rebuilt_without_init() -> None:
    error = rebuild_exception(f"{STACK}{__name__}.OwnError: code 3")

    assert type(error) is OwnError
    assert str(error) == "code 3"
    assert "in work" in str(error.__cause__)


def test_subclass_of_a_builtin_is_rebuilt() -> None:
    error = rebuild_exception(f"{STACK}{__name__}.OwnOSError: no such disk")

    assert type(error) is OwnOSError
    assert str(error) == "no such disk"


@pytest.mark.parametrize(
    "name",
    [
        "not_imported.OwnError",
        f"{__name__}.OwnStop",
        f"{__name__}.carried",
        f"{__name__}.Nothing",
        "this",  # a module that prints when it is imported
    ],
)
def test_other_classes_are_not_searched(name: str) -> None:
    assert type(rebuild_exception(f"{STACK}{name}: zap")) is TaskError
    assert "not_imported" not in sys.modules
    assert "this" not in sys.modules


class Measured(Exception):
    """An exception whose text is made of its attributes."""

    def __init__(self, value: float, *, unit: str) -> None:
        super().__init__(value)
        self.value = value
        self.unit = unit
        self.origin = object()  # cannot be sent

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"


class OwnGroup(ExceptionGroup[Exception]):
    """A group of the program's own."""


def carried(error: BaseException, *, trust: bool = False) -> Exception:
    """Return an exception as the caller of its function gets it."""
    record = encode_exception(error, pickles=trust)
    traceback = format_task_error(error)
    return rebuild_exception(traceback, "job1", record=record, worker="w", trust=trust)


class Order(pydantic.BaseModel):
    count: int
    price: float


def test_errors_of_libraries_are_themselves() -> None:
    with pytest.raises(json.JSONDecodeError) as parsing:
        json.loads("{bad")
    with pytest.raises(np.linalg.LinAlgError) as inverting:
        np.linalg.inv(np.zeros((2, 2)))
    with pytest.raises(pydantic.ValidationError) as validating:
        Order(count="x", price=[])  # type: ignore[arg-type]
    parsed, inverted = carried(parsing.value), carried(inverting.value)
    validated = carried(validating.value)

    assert isinstance(parsed, json.JSONDecodeError)
    assert (parsed.pos, parsed.doc) == (1, "{bad")
    assert isinstance(inverted, np.linalg.LinAlgError)
    assert isinstance(validated, pydantic.ValidationError)
    assert validated.title == "Order"
    lines = [(each["loc"], each["msg"], each["input"]) for each in validated.errors()]
    assert lines == [
        (each["loc"], each["msg"], each["input"]) for each in validating.value.errors()
    ]


def test_os_error_keeps_its_number_and_its_files() -> None:
    error = carried(FileNotFoundError(2, "No such file or directory", "data.csv"))

    assert type(error) is FileNotFoundError
    assert (error.errno, error.strerror, error.filename) == (
        2,
        "No such file or directory",
        "data.csv",
    )
    assert str(error) == "[Errno 2] No such file or directory: 'data.csv'"


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("zap", 3, {"at": [1, 2]}),
        KeyError((1, 2)),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        TooManyFailures("slow down", 7),
    ],
)
def test_arguments_are_kept(raised: Exception) -> None:
    error = carried(raised)

    assert type(error) is type(raised)
    assert str(error) == str(raised)
    assert {**vars(error), "__notes__": None} == {**vars(raised), "__notes__": None}


def test_import_error_keeps_the_name_of_the_module() -> None:
    error = carried(ModuleNotFoundError("No module named 'pandas'", name="pandas"))

    assert isinstance(error, ModuleNotFoundError)
    assert error.name == "pandas"


def test_own_exception_keeps_the_attributes_that_can_be_sent() -> None:
    error = carried(Measured(3.5, unit="kg"))

    assert isinstance(error, Measured)
    assert (error.value, error.unit) == (3.5, "kg")
    assert not hasattr(error, "origin")
    assert str(error) == "3.5 kg"


def test_subclass_of_os_error_keeps_its_number() -> None:
    error = carried(OwnOSError(13, "no"))

    assert isinstance(error, OwnOSError)
    assert error.errno == 13


def test_groups_keep_their_members() -> None:
    error = carried(OwnGroup("both", [OSError(5, "io"), Measured(1, unit="s")]))

    assert isinstance(error, OwnGroup)
    assert error.message == "both"
    first, second = error.exceptions
    assert isinstance(first, OSError)
    assert first.errno == 5
    assert isinstance(second, Measured)


def test_causes_come_before_the_remote_traceback() -> None:
    raised = ValueError("zap")
    raised.__cause__ = Measured(2, unit="m")

    error = carried(raised)

    assert isinstance(error.__cause__, Measured)
    assert isinstance(error.__cause__.__cause__, RemoteTraceback)


def test_unknown_member_or_cause_becomes_a_task_error() -> None:
    unknown = type("Elsewhere", (Exception,), {"__module__": "not_imported"})
    raised = ExceptionGroup("two", [unknown("gone"), ValueError("zap")])
    raised.__cause__ = unknown()

    error = carried(raised)

    assert isinstance(error, ExceptionGroup)
    assert str(error.exceptions[0]) == "not_imported.Elsewhere: gone"
    assert type(error.__cause__) is TaskError


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses attributes, as that of its cause."""

    code: int


class SlottedError(Exception):
    __slots__ = ("code",)
    code: int


class Delegating(Exception):
    """An exception that looks for attributes elsewhere, as ``HTTPError`` does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.file = object()  # cannot be sent

    def __getattr__(self, name: str) -> object:
        return getattr(vars(self)["file"], name)


def test_code_of_a_class_has_no_part_in_it(subtests: pytest.Subtests) -> None:
    slotted = SlottedError("zap")
    slotted.code = 3
    for raised in (FrozenError(3), Delegating("zap"), slotted):
        cause = ValueError("inner")
        BaseException.__dict__["__cause__"].__set__(raised, cause)
        with subtests.test(type(raised).__name__):
            error = carried(raised)

            assert type(error) is type(raised)
            assert error.args == raised.args
            assert type(error.__cause__) is ValueError
            assert "in the job job1" in vars(error)["__notes__"][-1]
    assert carried(slotted).code == 3  # type: ignore[attr-defined]


def test_notes_of_any_type_prevent_no_rebuilding() -> None:
    for notes, kept in (("a", "b"), ["a", "b"]), (5, []):
        raised = ValueError("zap")
        raised.__notes__ = notes  # type: ignore[assignment]

        error = carried(raised, trust=True)

        assert error.__notes__[:-1] == kept
        assert "in the job job1" in error.__notes__[-1]


def test_texts_that_are_not_unicode_are_kept() -> None:
    with pytest.raises(UnicodeEncodeError) as encoding:
        "\ud800".encode()

    assert carried(ValueError("a\ud800")).args == ("a\ud800",)
    assert carried(encoding.value).args == encoding.value.args
    assert "a\\ud800" in str(carried(ValueError("a\ud800")).__cause__)


def test_group_that_cannot_be_raised_is_named() -> None:
    group = BaseExceptionGroup("two", [KeyboardInterrupt(), ValueError(1)])

    error = carried(group)

    assert type(error) is TaskError
    assert str(error) == "BaseExceptionGroup: two (2 sub-exceptions)"


def test_notes_are_kept_and_end_with_machine_and_job() -> None:
    raised = ValueError("zap")
    raised.add_note("while reading")

    first, last = carried(raised).__notes__

    assert first == "while reading"
    assert last == f"raised on the machine {platform.node()}, in the job job1"


def test_worker_is_named_if_the_machine_is_unknown() -> None:
    error = rebuild_exception(f"{STACK}ValueError: zap", worker="macfleet:owl")

    assert error.__notes__ == ["raised on the machine macfleet:owl"]


class Socketed(Exception):
    """An exception that only pickle can carry."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.path = Path(where)


def test_trusted_exception_is_unpickled() -> None:
    error = carried(Socketed("/tmp"), trust=True)

    assert isinstance(error, Socketed)
    assert error.path == Path("/tmp")
    assert not hasattr(carried(Socketed("/tmp")), "path")


def test_pickle_is_not_read_without_trust() -> None:
    record = encode_exception(Socketed("/tmp"), pickles=True)

    error = rebuild_exception(f"{STACK}x", record=record)

    assert isinstance(error, Socketed)
    assert not hasattr(error, "path")


def test_exception_that_cannot_be_unpickled_is_rebuilt() -> None:
    error = carried(OwnError(3), trust=True)  # pickle would call __init__("code 3")

    assert isinstance(error, OwnError)
    assert error.code == 3


@pytest.mark.parametrize("name", ["SystemExit", "StopIteration", "print", "os.system"])
def test_forged_record_becomes_a_task_error(name: str) -> None:
    record = msgspec.msgpack.encode(ExceptionRecord(name, "forged"))

    assert type(rebuild_exception(f"{STACK}x: y", record=record)) is TaskError


def test_wrong_arguments_and_fields_do_no_harm() -> None:
    nothing = msgspec.msgpack.encode(None)
    fields = {"filename": b"\xc1", "errno": nothing, "__class__": nothing}
    record = ExceptionRecord("OSError", "x", b"\xc1", fields)

    error = rebuild_exception("x", record=msgspec.msgpack.encode(record))

    assert type(error) is OSError
    assert error.args == ("x",)


def test_no_record_is_an_error_of_the_reader(subtests: pytest.Subtests) -> None:
    odd: list[object] = [None, 2**70, "a", b"a", [], [1, [2]], {}]
    for name in ("UnicodeDecodeError", "SyntaxError", "ExceptionGroup", "OSError"):
        for value in odd:
            with subtests.test(name, value=value):
                fields = dict.fromkeys(["start", "__notes__", "add_note"], value)
                record = ExceptionRecord(
                    name,
                    "x",
                    pack(["u", b"a", value, value, "r"]).data,
                    {each: pack(value).data for each, value in fields.items()},
                )

                rebuild_exception("x", record=msgspec.msgpack.encode(record))


def test_damaged_record_leaves_the_traceback() -> None:
    error = rebuild_exception(f"{STACK}ValueError: zap", record=b"\xc1")

    assert type(error) is ValueError
    assert error.args == ("zap",)
