"""Operations above their handlers: what follows from these, and the forms of errors."""

import msgspec

from shoal.domain.credentials import Scope
from shoal.gateway.all_operations import OLLAMA_PORT, OPERATIONS
from shoal.gateway.chat.anthropic.message_answer import ANTHROPIC_ERRORS
from shoal.gateway.context import HealthGateway
from shoal.gateway.http.errors import OPENAI_ERRORS, PLAIN_ERRORS
from shoal.gateway.http.operation import Operations, below, error_form_finder


class Things(msgspec.Struct, frozen=True):
    data: list[str]


class ThingQuery(msgspec.Struct, frozen=True):
    limit: int = 1


class NewThing(msgspec.Struct, frozen=True):
    name: str


async def list_things(gateway: HealthGateway, query: ThingQuery) -> Things:
    return Things([str(query.limit)])


async def rename_thing(thing: str, body: NewThing, *, flag: bool = False) -> Things:
    return Things([thing, body.name])


def test_types_are_those_of_the_handler() -> None:
    api = Operations()
    api.get("/things", "List things", Scope.READ)(list_things)
    api.put("/things/{thing}", "Rename a thing", Scope.USE)(rename_thing)

    listing, renaming = api
    assert (listing.answer, listing.query, listing.body) == (Things, ThingQuery, None)
    assert (renaming.answer, renaming.query, renaming.body) == (Things, None, NewThing)
    assert [*renaming.takes] == ["thing", "body"]


def test_stated_answer_is_that_of_a_handler_that_encodes_it_itself() -> None:
    chats = [each for each in OPERATIONS if each.path == "/v1/chat/completions"]

    assert [each.answer and each.answer.__name__ for each in chats] == [
        "ChatCompletion"
    ]


def test_unknown_path_has_the_form_of_what_begins_as_it_does() -> None:
    form = error_form_finder(OPERATIONS)

    assert form("/v1/jobs/none/at/all") is form("/v1/trust") is PLAIN_ERRORS
    assert form("/ollama/none") is form("/api/none") is PLAIN_ERRORS
    assert form("/v1/messages/none") is ANTHROPIC_ERRORS
    assert form("/v1/none") is form("/none") is form("") is OPENAI_ERRORS
    assert form("/v1/jobsite") is OPENAI_ERRORS


def test_unknown_path_at_the_port_of_ollama_has_its_form() -> None:
    form = error_form_finder(OLLAMA_PORT)

    assert form("/none") is form("/api/none") is PLAIN_ERRORS
    assert form("/v1/none") is OPENAI_ERRORS
    assert form("/v1/messages/none") is ANTHROPIC_ERRORS


def test_operations_below_a_prefix_keep_the_form_of_their_errors() -> None:
    api = Operations(PLAIN_ERRORS)
    api.get("/things", "List things", Scope.READ)(list_things)

    (moved,) = below("/before", api)

    assert (moved.path, moved.errors) == ("/before/things", PLAIN_ERRORS)
