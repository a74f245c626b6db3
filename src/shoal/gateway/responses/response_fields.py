"""What a stored response returns of its request beside the chat.

The chat has the tools, the format of the text and the instructions; what it cannot say
is kept with the job, as ``JobTerms.api_fields``.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shoal.domain.errors import StoreError
from shoal.domain.work import Chat
from shoal.gateway.generation.messages import Message


class ResponseFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields; ``created_at`` is in Unix seconds.

    ``instructed``: the first message of the chat has the ``instructions``.
    ``allowed_tools`` are the names of the functions that ``tool_choice`` allowed, if it
    named any: the chat has no others.  ``summary`` is the kind of summary that
    ``reasoning`` asked for.
    """

    created_at: int
    instructed: bool = False
    background: bool = False
    previous_response_id: str | None = None
    allowed_tools: list[str] | None = None
    summary: str | None = None
    metadata: Mapping[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def encode(self) -> str:
        """Return the text that ``decode_fields`` decodes."""
        return msgspec.json.encode(self).decode()

    def instructions_of(self, chat: Chat) -> str | None:
        """Return the instructions of a response."""
        if not self.instructed:
            return None
        content = chat.messages[0].get("content")
        return content if isinstance(content, str) else None

    def input_of(self, chat: Chat) -> Sequence[Message]:
        """Return the messages of a response without its instructions."""
        return chat.messages[int(self.instructed) :]


_decoder = msgspec.json.Decoder(ResponseFields)


def decode_fields(text: str) -> ResponseFields | None:
    """Decode the fields of a job; None if it is no stored response.

    Raises StoreError if they are damaged.
    """
    if not text:
        return None
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"the fields of a response are damaged: {error}") from error
