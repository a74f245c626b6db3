"""Messages as engines and their templates take them."""

from collections.abc import Mapping
from typing import Any

import pytest

from shoal.engines.messages import (
    LATE_SYSTEM,
    SYSTEM,
    engine_messages,
    refusable_parts,
)

Message = Mapping[str, Any]


def said(role: str, content: object = "x", **more: object) -> Message:
    return {"role": role, "content": content, **more}


def calling(**arguments: Any) -> Message:
    function = {"name": "f", **arguments}
    return said("assistant", "", tool_calls=[{"id": "c1", "function": function}])


CALL = calling(arguments="{}")
RESULT = said("tool", "4", tool_call_id="c1")
S, T, U = said("system", "S"), said("system", "T"), said("system", "U")
HI, BYE, REPLY = said("user", "hi"), said("user", "bye"), said("assistant", "hello")


@pytest.mark.parametrize(
    ("messages", "sent"),
    [
        ([S, HI], [S, HI]),
        ([said("developer", "D"), HI], [said("system", "D"), HI]),
        ([S, said("developer", "D"), HI], [said("system", "S\n\nD"), HI]),
        (
            [said("system", [{"type": "text", "text": "S"}]), said("system", ""), HI],
            [said("system", "S"), HI],
        ),
        ([said("system", ""), HI], [said("system", ""), HI]),
        # Later ones stay where they are, each for itself.
        ([HI, said("developer", "T"), BYE], [HI, T, BYE]),
        ([S, HI, REPLY, T, U, BYE], [S, HI, REPLY, T, U, BYE]),
        # Roles that engines may refuse become the user's.
        ([said("Boss")], [said("user")]),
        ([{"role": ["x"], "content": "x"}], [said("user")]),
        ([{"content": "x"}], [{"content": "x"}]),
        # A tool's message that answers a call, and those that answer none.
        ([HI, CALL, RESULT], [HI, CALL, RESULT]),
        ([RESULT, CALL, RESULT], [said("user", "4"), CALL, RESULT]),
        ([CALL, said("tool", "4"), said("tool", "5", tool_call_id="c2")],
         [CALL, said("user", "4"), said("user", "5")]),
    ],
)  # fmt: skip
def test_messages_have_one_system_message_and_known_roles(
    messages: list[Message], sent: list[Message]
) -> None:
    assert engine_messages(messages) == sent
    assert engine_messages(sent) == sent


@pytest.mark.parametrize(
    ("refused", "messages", "sent"),
    [
        (
            LATE_SYSTEM,
            [S, HI, T, U, REPLY, BYE],
            [S, HI, REPLY, said("user", "T\n\nU\n\nbye")],
        ),
        (
            LATE_SYSTEM,
            [HI, T, said("user", [{"type": "image_url"}])],
            [HI, said("user", [{"type": "text", "text": "T"}, {"type": "image_url"}])],
        ),
        # No turn of the user follows: it is one.
        (LATE_SYSTEM, [HI, REPLY, T], [HI, REPLY, said("user", "T")]),
        (SYSTEM, [S, HI, REPLY], [said("user", "S\n\nhi"), REPLY]),
        (
            SYSTEM,
            [S, U, HI, T, BYE],
            [said("user", "S\n\nU\n\nhi"), said("user", "T\n\nbye")],
        ),
        (SYSTEM, [S], [said("user", "S")]),
        ("another", [HI, T, BYE], [HI, T, BYE]),
    ],
)  # fmt: skip
def test_refused_system_messages_are_part_of_the_users_next_turn(
    refused: str, messages: list[Message], sent: list[Message]
) -> None:
    assert engine_messages(messages, {refused}) == sent


def test_thoughts_in_a_history_have_the_names_that_engines_read() -> None:
    thought = said("assistant", "a", reasoning_content="because")
    both = said("assistant", "a", reasoning_content="because", reasoning="because")

    assert engine_messages([HI, thought]) == [HI, both]
    assert engine_messages([HI, both]) == [HI, both]
    assert engine_messages([HI, thought], {"reasoning"}) == [HI, said("assistant", "a")]


def test_calls_in_a_history_have_arguments_that_engines_can_decode() -> None:
    for call in (calling(), calling(arguments=""), calling(arguments=None), CALL):
        assert engine_messages([HI, call, RESULT]) == [HI, CALL, RESULT]
    kept = calling(arguments="{bad")
    assert engine_messages([HI, kept, RESULT]) == [HI, kept, RESULT]


def test_parts_that_an_engine_may_refuse_are_known() -> None:
    thought = said("assistant", "a", reasoning_content="because")

    assert refusable_parts([HI]) == set()
    assert refusable_parts([said("system"), HI]) == {SYSTEM}
    assert refusable_parts([said("system"), HI, said("system")]) == {LATE_SYSTEM}
    assert refusable_parts([HI, thought]) == {"reasoning"}
