"""Errors of calls, as Python exceptions."""

import pickle
import sys
from types import ModuleType

import pytest

from shoal.client.errors import (
    RemoteTraceback,
    TaskError,
    TaskTimeout,
    home_module,
    own_exception,
    rebuild_exception,
)
from shoal.domain.errors import InvalidRequest
from tasks import demo_tasks

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


def test_timeout_is_a_builtin_timeout_error() -> None:
    assert issubclass(TaskTimeout, TimeoutError)


def test_error_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(TaskTimeout("slow", "trace", "job1")))

    assert type(copy) is TaskTimeout
    assert (str(copy), copy.traceback, copy.job_id) == ("slow", "trace", "job1")


class OwnError(Exception):
    """Its constructor takes other arguments than its text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OwnOSError(OSError):
    """A subclass of a builtin with its own ``__new__``."""


class OwnStop(StopIteration):
    """An exception that a future cannot raise."""


def test_exception_of_the_functions_module_is_rebuilt() -> None:
    error = rebuild_exception(f"{STACK}{__name__}.OwnError: code 3", "", __name__)

    assert type(error) is OwnError
    assert str(error) == "code 3"
    assert "in work" in str(error.__cause__)


def test_subclass_of_a_builtin_is_rebuilt_without_init() -> None:
    error = own_exception(__name__, f"{__name__}.OwnOSError", "no such disk")

    assert type(error) is OwnOSError
    assert str(error) == "no such disk"


def test_exception_of_a_referenced_module_is_found() -> None:
    home = ModuleType("its_home")
    vars(home)["errors"] = sys.modules[__name__]
    sys.modules["its_home"] = home
    try:
        assert type(own_exception("its_home", f"{__name__}.OwnError", "x")) is OwnError
    finally:
        del sys.modules["its_home"]


@pytest.mark.parametrize(
    ("home", "name"),
    [
        ("", f"{__name__}.OwnError"),
        ("json", f"{__name__}.OwnError"),
        ("not_imported", "not_imported.OwnError"),
        (__name__, f"{__name__}.OwnStop"),
        (__name__, f"{__name__}.home_of"),
        (__name__, "subprocess.CalledProcessError"),
    ],
)
def test_other_classes_are_not_searched(home: str, name: str) -> None:
    assert type(rebuild_exception(f"{STACK}{name}: zap", "", home)) is TaskError
    assert "not_imported" not in sys.modules


def test_home_module_follows_the_function_or_its_name() -> None:
    assert home_module("demo.add", demo_tasks.add) == demo_tasks.__name__
    assert home_module(f"{__name__}.OwnError") == __name__
    assert home_module(f"{__name__}.nothing") == ""
    assert home_module("add") == ""
