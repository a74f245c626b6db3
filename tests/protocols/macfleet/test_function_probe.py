"""The function names in a worker's error, which may be any text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from shoal.protocols.macfleet.function_probe import is_unknown_function, known_functions


def listed(names: str, before: str = "Traceback ...\nmacfleet.compute.models.") -> str:
    return (
        f"{before}TaskNotRegisteredError: Task 'shoal.which' not registered on this "
        f"worker. Known tasks: [{names}]"
    )


@settings(max_examples=examples(0.4))
@given(st.frozensets(st.text(min_size=1, max_size=20), max_size=5))
def test_names_are_parsed_from_python_literals(names: frozenset[str]) -> None:
    told = ", ".join(map(repr, sorted(names)))

    assert known_functions(listed(told)) == names


@pytest.mark.parametrize(
    "names", ["'a', b", "'a',", "'a", "'a' 'b'", "1, 2", "'a', ['b']", "open('x')"]
)
def test_a_malformed_list_of_names_is_ignored(names: str) -> None:
    assert known_functions(listed(names)) is None


def test_other_errors_list_no_functions() -> None:
    assert known_functions("ValueError: Known tasks: ['a']") is None
    assert not is_unknown_function("KeyError: 'TaskNotRegisteredError'")
    assert is_unknown_function(listed("'a'", before=""))
    assert is_unknown_function(listed("'a'") + "\n")
    assert not is_unknown_function(
        listed("'a'") + "\nduring handling of which\nValueError: x"
    )


def test_the_number_of_names_is_limited() -> None:
    many = ", ".join(repr(f"n{number}") for number in range(10_000))

    assert len(known_functions(listed(many)) or ()) == 4096
    assert known_functions(listed(repr("x" * 300))) == frozenset()


@given(st.text(max_size=300))
def test_any_error_text_is_parsed_without_failing(text: str) -> None:
    known_functions(text)
    known_functions(listed(text))
