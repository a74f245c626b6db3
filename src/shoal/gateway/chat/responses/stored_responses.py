"""Finds stored responses, and what requests take from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.coordinator.recovery import RESTARTED
from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound, ShoalError
from shoal.domain.facts import JobRequeued
from shoal.domain.ids import JobId
from shoal.domain.json_limits import characters_in
from shoal.domain.moderation import BLOCKED, FILTERED
from shoal.domain.outcome import Outcome
from shoal.domain.work import Chat
from shoal.gateway.chat.answer_parts import Part, parts_of
from shoal.gateway.chat.job_answers import stored_end
from shoal.gateway.chat.messages import Message
from shoal.gateway.chat.responses.body import decode_fields
from shoal.gateway.chat.responses.items import ItemReference, messages_of
from shoal.gateway.chat.responses.request import ResponseRequest
from shoal.gateway.chat.responses.response_object import (
    ResponseDraft,
    ResponseObject,
    item_id,
)
from shoal.gateway.context import JobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.http.ids import RESPONSE_ID_PREFIX, job_id_of
from shoal.pool.lifecycle import JobState
from shoal.store.port import StoredJob

REFERRED_MAX = 512  # responses that one request refers to: each is read from the store
TAKEN_MAX = BODY_MAX  # characters of earlier responses in one request


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as the store has it.

    ``end`` is how its job ended, as the caller may see it; None: it has not ended.
    """

    draft: ResponseDraft
    owner: str
    state: JobState
    end: Outcome | ShoalError | None

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the answer, if there is one."""
        if not isinstance(self.end, Outcome):
            return []
        return parts_of(self.end, self.draft.call_prefix)

    def show(self) -> ResponseObject:
        """Return the response as it is now."""
        match self.end:
            case None:
                waits = self.state is JobState.QUEUED
                return self.draft.response("queued" if waits else "in_progress")
            case Outcome():
                return self.draft.answered(self.end)
            case ShoalError():
                return self.draft.failed(self.end)


async def find_response(
    gateway: JobsGateway, caller: ApiCaller, response_id: str, *, own: bool = False
) -> StoredResponse:
    """Return a response that the caller may see, or with ``own`` its own.

    Raises NotFound.
    """
    stored = None
    if response_id.startswith(RESPONSE_ID_PREFIX):
        stored = await gateway.store.job(job_id_of(response_id))
    found = None if stored is None else _stored_response(gateway, stored)
    mine = found is not None and caller.owns(found.owner, found.draft.job_id)
    if found is None or not (mine or (not own and caller.has_scope(Scope.MONITOR))):
        raise NotFound(
            f"there is no response {response_id[:80]!r}: it never existed, was not "
            "stored, or was deleted"
        )
    return found


def storable(caller: ApiCaller, decoded: ResponseRequest) -> ResponseRequest:
    """Return the request; of a caller without a key, it is not to be stored.

    All of them are one owner: any would find the responses of the others.

    Raises InvalidRequest naming the field that needs stored responses.
    """
    if not caller.is_keyless:
        return decoded
    needing = [reference.path for reference in decoded.references]
    if decoded.fields.background:
        needing.insert(0, "background")
    if decoded.fields.previous_response_id:
        needing.insert(0, "previous_response_id")
    if needing:
        raise InvalidRequest(
            f"{needing[0]}: only for clients with a key: send the header "
            "`Authorization: Bearer KEY`",
            needing[0],
        )
    return replace(decoded, stored=False)


async def chat_of(
    gateway: JobsGateway, caller: ApiCaller, decoded: ResponseRequest
) -> Chat:
    """Return the chat of a request, including what it refers to in earlier responses.

    Raises NotFound, InvalidRequest.
    """
    earlier: Sequence[Message] = ()
    if decoded.fields.previous_response_id:
        previous = decoded.fields.previous_response_id
        earlier = await _previous_messages(gateway, caller, previous)
    taken = characters_in(earlier)
    _check_taken(taken, "previous_response_id")
    parts = await _find_parts(gateway, caller, decoded.references, taken)
    return decoded.chat(earlier, parts)


async def starts_of(gateway: JobsGateway, job_id: JobId) -> int:
    """Return how often a job's answer has started over: at restarts of the coordinator.

    Within one run of the coordinator, another worker continues it where it was.
    """
    return sum(
        isinstance(each.fact, JobRequeued) and each.fact.reason == RESTARTED
        for each in await gateway.store.history_since(job_id, 0)
    )


async def _previous_messages(
    gateway: JobsGateway, caller: ApiCaller, response_id: str
) -> Sequence[Message]:
    """Return the messages of an earlier response and its answer.

    Its instructions are left out.  Raises NotFound, and InvalidRequest if it has no
    answer.
    """
    found = await find_response(gateway, caller, response_id, own=True)
    if not isinstance(found.end, Outcome):
        what = "has not ended yet" if found.end is None else "has no answer"
        field = "previous_response_id"
        raise InvalidRequest(f"{field}: {response_id} {what}", field)
    chat, fields = found.draft.chat, found.draft.fields
    return [*fields.input_of(chat), *messages_of(found.parts)]


async def _find_parts(
    gateway: JobsGateway,
    caller: ApiCaller,
    references: Sequence[ItemReference],
    taken: int,
) -> Mapping[str, Part]:
    """Return the parts of earlier responses that the references name, by their ids.

    ``taken`` is how many characters the request has of earlier responses already.

    Raises InvalidRequest naming the first that is not found or too much, or if they are
    of more than ``REFERRED_MAX`` responses.
    """
    found: dict[str, Part] = {}
    named = {reference.id for reference in references}
    responses = 0
    for reference in references:
        if reference.id in found:
            taken += _size_of(found[reference.id])
            _check_taken(taken, reference.path)
            continue
        if responses == REFERRED_MAX:
            text = f"{reference.path}: more than {REFERRED_MAX} responses referred to"
            raise InvalidRequest(text, reference.path)
        parts = await _parts_beside(gateway, caller, reference)
        found |= {id_: part for id_, part in parts.items() if id_ in named}
        responses += 1
        taken += _size_of(found[reference.id])
        _check_taken(taken, reference.path)
    return found


def _size_of(part: Part) -> int:
    return characters_in([part.text, part.call_id, part.name])


def _check_taken(characters: int, field: str) -> None:
    """Raise InvalidRequest if a request takes too much from earlier responses.

    Its references are short, but each may stand for a whole answer.
    """
    if characters > TAKEN_MAX:
        raise InvalidRequest(
            f"{field}: more than {TAKEN_MAX} characters of earlier responses", field
        )


async def _parts_beside(
    gateway: JobsGateway, caller: ApiCaller, reference: ItemReference
) -> Mapping[str, Part]:
    """Return all parts of the response with the item, by their ids."""
    named, _, _ = reference.id.partition("_")[2].rpartition("_")
    try:
        stored = await find_response(
            gateway, caller, f"{RESPONSE_ID_PREFIX}{named}", own=True
        )
    except NotFound:
        stored = None
    parts = (
        {}
        if stored is None
        else {
            item_id(stored.draft.job_id, index, part.kind): part
            for index, part in enumerate(stored.parts)
        }
    )
    if reference.id not in parts:
        raise InvalidRequest(
            f"{reference.path}: there is no item {reference.id[:80]!r}", reference.path
        )
    return parts


def _stored_response(gateway: JobsGateway, stored: StoredJob) -> StoredResponse | None:
    """Return the response of a job; None if it is not one."""
    job = stored.job
    fields = decode_fields(job.terms.api_fields)
    if fields is None or not isinstance(job.work, Chat):
        return None
    return StoredResponse(
        ResponseDraft(job.id, job.work, fields),
        job.owner,
        stored.state,
        _end(gateway, stored),
    )


def _end(gateway: JobsGateway, stored: StoredJob) -> Outcome | ShoalError | None:
    if stored.ended_at is None:
        return None
    if stored.outcome is None and stored.error == BLOCKED:
        return FILTERED
    return stored_end(gateway, stored)
