"""What a request's address says: the job that is meant, and the query."""

from typing import TypeVar

import msgspec
from aiohttp import web

from shoal.domain.errors import InvalidRequest
from shoal.domain.ids import JobId
from shoal.gateway.chat_answer import PREFIX as CHAT
from shoal.gateway.completion_answer import PREFIX as COMPLETION
from shoal.gateway.decoding import misfit

Q = TypeVar("Q", bound=msgspec.Struct)


def job_in(request: web.Request) -> JobId:
    """Return the id of the job that is meant, which clients know with a prefix."""
    return JobId(request.match_info["id"].removeprefix(CHAT).removeprefix(COMPLETION))


def read_query(request: web.Request, kind: type[Q]) -> Q:
    """Return what is asked for.

    Raises InvalidRequest for what is misspelt or said twice.
    """
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise InvalidRequest(f"{name}: given more than once", name)
        given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        said = misfit(str(error))
        text = str(said).replace("the body: object contains", "the query has an")
        raise InvalidRequest(text, said.field) from error
