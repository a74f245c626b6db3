"""The exports of ``shoal``, and their lazy import."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

NAMES = sorted({*shoal.__all__} - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_every_export_is_importable(name: str) -> None:
    assert getattr(shoal, name).__name__.lower() == name.lower()


def test_type_stub_has_the_same_names() -> None:
    stub = Path(shoal.__file__).with_suffix(".pyi").read_text()

    assert sorted(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == NAMES


def test_every_export_and_method_has_a_docstring() -> None:
    documented = {name: getattr(shoal, name) for name in NAMES}
    for name, value in [*documented.items()]:
        methods = inspect.getmembers(value, inspect.isfunction)
        documented |= {
            f"{name}.{method}": function
            for method, function in methods
            if not method.startswith("_")
        }

    assert [name for name, it in documented.items() if not inspect.getdoc(it)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Poll'"):
        shoal.Poll  # type: ignore[attr-defined]  # noqa: B018  # that is the point


def test_modules_are_loaded_lazily() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import sys, shoal; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert not {"aiohttp", "numpy", "shoal.client"} & {*result.stdout.split()}
