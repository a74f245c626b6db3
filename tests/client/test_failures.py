"""What the coordinator says of a call that failed, as exceptions."""

import pickle

import pytest

from shoal.client.failures import RemoteTraceback, TaskError, TaskTimeout, rebuilt
from shoal.domain.errors import InvalidRequest

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
def test_classes_of_python_and_our_own_are_built_again(
    last: str, error: Exception | type[Exception]
) -> None:
    built = rebuilt(STACK + last)

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
def test_anything_else_is_a_task_error_with_its_text(last: str) -> None:
    built = rebuilt(STACK + last, "job1")

    assert type(built) is TaskError
    assert str(built) == last
    assert built.traceback == STACK + last
    assert built.job_id == "job1"


def test_last_of_chained_tracebacks_counts() -> None:
    chained = (
        f"{STACK}KeyError: 1\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{STACK}TypeError: zap\n"
    )

    assert type(rebuilt(chained)) is TypeError


def test_cause_shows_the_remote_traceback() -> None:
    text = f"{STACK}ValueError: zap"

    built = rebuilt(text)

    assert isinstance(built.__cause__, RemoteTraceback)
    assert text in str(built.__cause__)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):\n", "\n\n"])
def test_traceback_without_words_is_still_an_error(text: str) -> None:
    assert isinstance(rebuilt(text), TaskError)


def test_running_out_of_time_is_pythons_own_error_as_well() -> None:
    assert issubclass(TaskTimeout, TimeoutError)


def test_error_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(TaskTimeout("slow", "trace", "job1")))

    assert type(copy) is TaskTimeout
    assert (str(copy), copy.traceback, copy.job_id) == ("slow", "trace", "job1")
