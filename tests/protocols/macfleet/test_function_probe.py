"""The names in a real worker's answer, which may be anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocols.macfleet.function_probe import is_unknown_function, known_functions


def listed(names: str, before: str = "Traceback ...\nmacfleet.compute.models.") -> str:
    return (
        f"{before}TaskNotRegisteredError: Task 'shoal.which' not registered on this "
        f"worker. Known tasks: [{names}]"
    )


@given(st.frozensets(st.text(min_size=1, max_size=20), max_size=5))
def test_names_are_read_as_python_writes_them(names: frozenset[str]) -> None:
    told = ", ".join(map(repr, sorted(names)))

    assert known_functions(listed(told)) == names


@pytest.mark.parametrize(
    "names", ["'a', b", "'a',", "'a", "'a' 'b'", "1, 2", "'a', ['b']", "open('x')"]
)
def test_what_is_no_list_of_names_says_nothing(names: str) -> None:
    assert known_functions(listed(names)) is None


def test_what_is_not_about_an_unknown_task_says_nothing() -> None:
    assert known_functions("ValueError: Known tasks: ['a']") is None
    assert not is_unknown_function("KeyError: 'TaskNotRegisteredError'")
    assert is_unknown_function(listed("'a'", before=""))
    assert is_unknown_function(listed("'a'") + "\n")
    assert not is_unknown_function(
        listed("'a'") + "\nduring handling of which\nValueError: x"
    )


def test_names_are_believed_up_to_a_limit() -> None:
    many = ", ".join(repr(f"n{number}") for number in range(10_000))

    assert len(known_functions(listed(many)) or ()) == 4096
    assert known_functions(listed(repr("x" * 300))) == frozenset()


@given(st.text(max_size=300))
def test_no_text_whatever_breaks_it(text: str) -> None:
    known_functions(text)
    known_functions(listed(text))
