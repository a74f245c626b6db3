"""Runs a test once for each recorded case, as one test: there are thousands of them."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., Any]


def in_each_case(cases: Mapping[str, object]) -> Callable[[Test], Test]:
    """Pass a test each case, by its name, as ``case``; all that fail are reported."""

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @wraps(test)
            async def run_async(subtests: pytest.Subtests, **fixtures: object) -> None:
                for name, case in cases.items():
                    with subtests.test(name):
                        await test(case=case, **fixtures)

            return _with_fixtures(run_async, test)

        @wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: object) -> None:
            for name, case in cases.items():
                with subtests.test(name):
                    test(case=case, **fixtures)

        return _with_fixtures(run, test)

    return decorate


def _with_fixtures(run: Test, test: Test) -> Test:
    """Let pytest pass what a test asks for, but for its case."""
    parameters = inspect.signature(test).parameters
    kept = [each for name, each in parameters.items() if name != "case"]
    subtests = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([subtests, *kept])  # type: ignore[attr-defined]  # inspect reads it
    return run
