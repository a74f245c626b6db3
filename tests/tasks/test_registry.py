"""Registration of tasks: names, and functions that are rejected."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.domain.errors import ConfigError
from shoal.tasks.registry import (
    TASKS,
    import_tasks,
    task,
    task_name,
    unregistered_message,
)


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the registry after each test."""
    before = dict(TASKS)
    TASKS.clear()
    yield
    TASKS.clear()
    TASKS.update(before)


def plain(x: int) -> int:
    return x + 1


def other(x: int) -> int:
    return x - 1


class Sums:
    @staticmethod
    def add(x: int, y: int) -> int:
        return x + y

    def of_all(self) -> int:
        return 0


def test_decorated_function_is_unchanged_and_has_a_name() -> None:
    assert task(plain) is plain
    assert plain(1) == 2
    assert task_name(plain) == f"{__name__}.plain"
    assert task_name(lambda: None) is None
    assert TASKS[f"{__name__}.plain"].function is plain


def test_name_and_timeout_can_be_given() -> None:
    task(name="sums.add", timeout=5.0)(Sums.add)

    assert task_name(Sums.add) == "sums.add"
    assert TASKS["sums.add"].timeout == 5.0


def test_static_method_is_named_with_its_class() -> None:
    task(Sums.add)

    assert task_name(Sums.add) == f"{__name__}.Sums.add"


def test_reloaded_module_replaces_its_tasks() -> None:
    task(plain)
    task(plain)

    assert len(TASKS) == 1


def test_duplicate_name_is_rejected_with_both_functions() -> None:
    task(name="same")(plain)

    with pytest.raises(ConfigError, match=r"\.other and .*\.plain both .*'same'"):
        task(name="same")(other)


def test_function_that_workers_cannot_import_is_rejected() -> None:
    def inner() -> None:
        pass

    for function, message in (
        (lambda: 1, "on a lambda"),
        (inner, "cannot import a nested function"),
        (len, "expected a function defined with def"),
        (_yields, "cannot be a generator"),
    ):
        with pytest.raises(ConfigError, match=message):
            task(function)


def _yields() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("name", ["a\nb", "x" * 257])
def test_unprintable_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        task(name=name)(plain)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_invalid_timeout_is_rejected(timeout: float) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        task(timeout=timeout)(plain)


def test_unknown_name_error_lists_known_names_in_order() -> None:
    task(name="b")(plain)
    task(name="a")(other)

    assert unregistered_message("c").endswith(
        "Task 'c' not registered on this worker. Known tasks: ['a', 'b']"
    )


def test_main_module_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = type(sys)("__main__")
    main.__file__ = str(tmp_path / "sums.py")
    main.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(plain, "__module__", "__main__")

    task(plain)

    assert task_name(plain) == "sums.plain"


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    missing = tmp_path / "none.py"

    with pytest.raises(ConfigError, match=re.escape(f"{missing}: no such")):
        import_tasks([str(missing)])


def test_file_with_the_name_of_another_module_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "json.py").touch()

    with pytest.raises(ConfigError, match="another module is named 'json'"):
        import_tasks([str(tmp_path / "json.py")])


TWICE = """import shoal.tasks.registry as r

@r.task
def f(): return 1

@r.task
def f(): return 2
"""


def test_duplicate_name_in_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(TWICE)

    with pytest.raises(
        ConfigError, match=r"twice\.f is defined twice .* 3 and 6; rename"
    ):
        import_tasks([str(tmp_path / "twice.py")])


def test_changed_module_can_be_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loaded.py"
    file.write_text(TWICE.partition("\n@")[0] + TWICE[TWICE.rindex("@r") - 1 :])
    monkeypatch.syspath_prepend(tmp_path)
    import_tasks(["loaded"])
    file.write_text("# a line more\n" + file.read_text())

    importlib.reload(sys.modules["loaded"])

    assert TASKS["loaded.f"].function() == 2


def test_instance_method_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"Sums\.of_all: workers have no object to call a method on"
    ):
        task(Sums.of_all)


def test_tasks_of_previously_imported_modules_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(TWICE[: TWICE.rindex("\n@")])
    (tmp_path / "gathered.py").write_text("import theirs\nfrom theirs import f\n")
    monkeypatch.syspath_prepend(tmp_path)

    import_tasks(["gathered", "theirs", "gathered"])

    assert [*TASKS] == ["theirs.f"]
