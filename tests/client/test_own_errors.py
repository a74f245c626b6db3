"""A program's own exceptions, as far as they can be told from a traceback."""

import sys
from types import ModuleType

import pytest

from shoal.client.failures import TaskError, rebuilt
from shoal.client.own_errors import home_of, own_error
from tasks import demo_tasks

STACK = """Traceback (most recent call last):
  File "work.py", line 3, in work
    raise it
"""


class OwnError(Exception):
    """Takes something else than its text."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class OwnOSError(OSError):
    """Of a class of Python's that makes its instances by itself."""


class OwnStop(StopIteration):
    """What a future cannot raise."""


def test_error_of_the_functions_own_module_is_of_its_class() -> None:
    error = rebuilt(f"{STACK}{__name__}.OwnError: code 3", "", __name__)

    assert type(error) is OwnError
    assert str(error) == "code 3"
    assert "in work" in str(error.__cause__)


def test_class_made_from_one_of_pythons_is_made_as_that_is() -> None:
    error = own_error(__name__, f"{__name__}.OwnOSError", "no such disk")

    assert type(error) is OwnOSError
    assert str(error) == "no such disk"


def test_error_of_a_module_that_the_functions_own_names_is_found() -> None:
    home = ModuleType("its_home")
    vars(home)["errors"] = sys.modules[__name__]
    sys.modules["its_home"] = home
    try:
        assert type(own_error("its_home", f"{__name__}.OwnError", "x")) is OwnError
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
def test_any_other_class_is_not_looked_for(home: str, name: str) -> None:
    assert type(rebuilt(f"{STACK}{name}: zap", "", home)) is TaskError
    assert "not_imported" not in sys.modules


def test_module_of_a_function_is_known_by_the_function_or_its_name() -> None:
    assert home_of("demo.add", demo_tasks.add) == demo_tasks.__name__
    assert home_of(f"{__name__}.OwnError") == __name__
    assert home_of(f"{__name__}.nothing") == ""
    assert home_of("add") == ""
