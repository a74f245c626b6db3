"""Cluster messages as JSON: an object with one key, the kind, and the payload below it.

Real peers write one more layer, ``{"hello": {"_0": {..}}}``, and Macs read no other;
both forms are read, and ``_0`` wins.  ``PayloadForm`` chooses the form to write.
Source: TealeNet's "Cluster Messages", and what real peers do; see
``docs/protocols/tealenet.md``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from shoal.domain.answer_assembly import describe_invalid_fields
from shoal.domain.errors import PeerError
from shoal.domain.json_limits import NESTING_MAX, has_more_values, is_too_deep
from shoal.protocols.seam.session import Data
from shoal.protocols.tealenet.codec import messages
from shoal.protocols.tealenet.codec.chats import describe_invalid_chat
from shoal.protocols.tealenet.codec.scalars import ID_MAX, encode_json, wire_name

VERSION = 1  # of the protocol; no peer checks it
VALUES_MAX = 200_000  # values in a message: reading them takes about 20 ms
LONG = 2 * VALUES_MAX  # bytes above which a message can have more values
LENIENT_MAX = 64 << 10  # bytes of a message that is read leniently: in some 10 ms
ERROR_MAX = 500  # characters of an error's text

_BOM = b"\xef\xbb\xbf"
_HALF = re.compile(  # a lone surrogate; a pair, or another escape, is a group
    rb"(\\[^u]|\\ud[89ab]\w\w\\ud[c-f]\w\w)|\\ud[89a-f]\w\w", re.IGNORECASE
)


class BadMessage(PeerError):
    """An invalid message; ``kind`` and ``request_id`` are empty if they are unknown.

    ``request_id`` is the id of a request or a transfer, for the answer.
    """

    def __init__(self, why: str, kind: str = "", request_id: str = "") -> None:
        text = f"{kind}: {why}" if kind else why
        super().__init__(text[:ERROR_MAX])
        self.kind = kind
        self.request_id = request_id


def decode(data: Data) -> messages.Message | None:
    """Decode a message; None for an unknown kind, as a newer peer may send.

    Ignores keys beside the kind.  The last of duplicate keys counts, as for Rust
    peers.  Numbers without a fraction are integers in any notation.

    Raises BadMessage if it is not a JSON object, has two kinds or an invalid payload.
    """
    text = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    # Fast path: all real peers write the kind first and no space before it.
    form = _FORMS.get(text[2 : text.find(b'"', 2)])
    if form is None or (form.holds_many and len(text) > LONG):
        return _decode_any(text)
    try:
        message: messages.Message = form.wrapped.decode(text).layer.payload
    except (ValueError, RecursionError):
        return _decode_any(text)  # another form, or invalid: this says why
    return _validated(form, message, text)


def encode(message: messages.SentMessage, flat: bool = False) -> bytes:
    """Encode a message; ``flat``: in the document's form, which Macs do not read.

    That form has nulls where the document writes "or null", since a program that knows
    the document alone may require the fields.

    Raises PeerError if it is nested too deeply.
    """
    kind = type(message)
    form = _FORMS_BY_TYPE[kind]
    body = encode_json(message)
    if not flat:
        return b"".join((form.head, body, b"}}"))
    nulls = [
        b',"%b":null' % wire_name(name).encode()
        for name in _OR_NULL.get(kind, ())
        if getattr(message, name) is None
    ]
    return b"".join((form.flat_head, body[:-1], *nulls, b"}}"))


def is_flat(data: Data) -> bool | None:
    """Return whether a message is in the document's form, without the layer ``_0``.

    None for an unknown kind, and for data that is no message.
    """
    text = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    try:
        return _split(text.removeprefix(_BOM)).flat
    except BadMessage:
        return None


class PayloadForm:
    """The form in which this end writes to one peer: that of the peer's first message.

    The document has flat payloads; real peers wrap them, and Macs read no other form.
    Both ends of a conversation therefore write the form of the peer that cannot read
    both.  Until the peer has sent a message its form is not ``known``: the first
    message is wrapped, and what has to be repeated is written in both forms.

    One object can serve successive connections to an address: a peer that closes the
    connection without a word may be unable to read the form of the greeting, so the
    next one begins with the other form.
    """

    def __init__(self) -> None:
        self.flat = False
        self.known = False
        self._unanswered = False  # whether the last session got no message

    def start_session(self) -> None:
        """Begin a conversation; the peer has to show its form again."""
        if self._unanswered:
            self.flat = not self.flat
        self._unanswered, self.known = True, False

    def learn(self, data: Data) -> None:
        """Adopt the form of the peer's first message; ignore what is no message."""
        flat = None if self.known else is_flat(data)
        if flat is not None:
            self.flat, self.known, self._unanswered = flat, True, False

    def encode(self, message: messages.SentMessage) -> bytes:
        """Encode a message.  Raises PeerError if it is nested too deeply."""
        return encode(message, self.flat)

    def encode_again(self, message: messages.SentMessage) -> Sequence[bytes]:
        """Encode a message that repeats an unanswered one."""
        encoded = self.encode(message)
        return (encoded,) if self.known else (encoded, encode(message, not self.flat))


# Private parts, in the order in which they are called.

_INTRODUCED = "cluster_passcode_hash", "owner_user_id"
_REPORTED = "organization_id", "owner_user_id"
_OR_NULL: Mapping[type, tuple[str, ...]] = {
    messages.Hello: _INTRODUCED,
    messages.HelloAck: _INTRODUCED,
    messages.Heartbeat: _REPORTED,
    messages.HeartbeatAck: _REPORTED,
}


_Validator: TypeAlias = Callable[[Any, bytes], str | None]
"""Returns what is wrong with a message, given its text as well, or None."""


def _request_error(message: messages.InferenceRequest, text: bytes) -> str | None:
    if _may_be_deep(text) and is_too_deep(message.request):
        return "request: nested too deeply"
    fault = describe_invalid_chat(message.request)
    return None if fault is None else f"request: {fault}"


def _chunk_error(message: messages.InferenceChunk, text: bytes) -> str | None:
    structured = []
    for choice in message.chunk.choices:
        delta = choice.delta or {}
        is_text = len(delta) == 1 and isinstance(delta.get("content"), str)
        if is_text and choice.logprobs is None:
            continue
        if (fault := describe_invalid_fields(delta)) is not None:
            return f"chunk: {fault}"
        structured.append([delta, choice.logprobs])
    if structured and _may_be_deep(text) and is_too_deep(structured):
        return "chunk: nested too deeply"
    return None


def _file_error(message: messages.ModelTransferChunk, text: bytes) -> str | None:
    """Return what is wrong with a file's name: a path must not leave the folder."""
    name = message.file_name
    parts = name.split("/")
    if "\\" in name or not name.isprintable() or {"", ".", ".."} & set(parts):
        return "fileName: expected a name within the model's folder"
    return None


def _may_be_deep(text: bytes) -> bool:
    return text.count(b"{") + text.count(b"[") > NESTING_MAX


_VALIDATORS: Mapping[type, _Validator] = {
    messages.InferenceRequest: _request_error,
    messages.InferenceChunk: _chunk_error,
    messages.ModelTransferChunk: _file_error,
}
"""The validators of the types that need more than type checks.

Source: what real peers refuse; see ``docs/protocols/tealenet.md``.
"""


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kind of message is read and written.

    ``wrapped`` reads the form of real peers, without other keys.  ``holds_many``: it
    may contain many small values, which take more memory than their text.
    """

    kind: str
    payload: msgspec.json.Decoder[Any]
    wrapped: msgspec.json.Decoder[Any]
    validator: _Validator | None
    holds_many: bool
    head: bytes
    flat_head: bytes


class _Layer(msgspec.Struct, rename={"payload": "_0"}):
    """The layer that real peers write around a payload."""

    payload: Raw | UnsetType = UNSET


class _Ids(msgspec.Struct, rename={"request": "requestID", "transfer": "transferID"}):
    """The id in an invalid message, for the answer."""

    request: Any = None
    transfer: Any = None


def _decode_any(text: bytes) -> messages.Message | None:
    """Decode a message of any form, in steps, to find out what is wrong with it."""
    text = text.removeprefix(_BOM)
    kind, payload, _ = _split(text)
    if payload is None:
        return None
    form = _FORMS[kind.encode()]
    try:
        message: messages.Message = form.payload.decode(payload)
    except (ValueError, RecursionError) as error:
        try:
            message = _decode_leniently(form, payload)
        except (ValueError, RecursionError):
            raise BadMessage(_error_text(error), kind, _id_in(payload)) from error
    return _validated(form, message, text)


class _Parts(NamedTuple):
    """A message's kind, payload and form; Nones for an unknown kind."""

    kind: str
    payload: Raw | None
    flat: bool | None


def _split(text: bytes) -> _Parts:
    """Return the parts of a message.  Raises BadMessage if it is none."""
    try:
        if len(text) > LONG and has_more_values(text.decode(), VALUES_MAX):
            raise BadMessage(f"more than {VALUES_MAX} values")
        if len(text) <= LENIENT_MAX:
            # A program that cuts texts by UTF-16 units writes halves of characters.
            text = _HALF.sub(lambda half: half[1] or rb"\ufffd", text)
        entries: dict[str, Raw] = _objects.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"expected a JSON object: {_error_text(error)}") from error
    kinds = [kind for kind in messages.KINDS if kind in entries]
    if not entries or len(kinds) > 1:
        found = " and ".join(kinds) or "none"
        raise BadMessage(f"expected one kind, found {found}", *kinds[:1])
    if not kinds:
        return _Parts("", None, None)
    payload = entries[kinds[0]]
    try:
        inner = _layers.decode(payload).payload
    except (ValueError, RecursionError) as error:
        raise BadMessage(_error_text(error), kinds[0]) from error
    if isinstance(inner, UnsetType):
        return _Parts(kinds[0], payload, flat=True)
    return _Parts(kinds[0], inner, flat=False)


def _decode_leniently(form: _Form, payload: Raw) -> messages.Message:
    """Read a payload whose integers may be written as 100.0, as Macs write them.

    Raises ValueError or RecursionError if the payload is invalid in another way.
    """
    if memoryview(payload).nbytes > LENIENT_MAX:
        raise ValueError
    tree = _objects_of_any.decode(payload)
    if is_too_deep(tree):
        raise RecursionError
    message: messages.Message = msgspec.convert(_with_integers(tree), form.payload.type)
    return message


def _with_integers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {name: _with_integers(inner) for name, inner in value.items()}
        case list():
            return [_with_integers(inner) for inner in value]
        case _:
            return value


def _id_in(payload: Raw) -> str:
    try:
        ids: _Ids = _ids.decode(payload)
    except (ValueError, RecursionError):
        return ""
    given = ids.request if ids.request is not None else ids.transfer
    return given if isinstance(given, str) and len(given) <= ID_MAX else ""


def _error_text(error: Exception) -> str:
    """Return the reason why a JSON text is invalid, without quoting from it."""
    if isinstance(error, msgspec.ValidationError):
        return str(error)
    return "nested too deeply" if isinstance(error, RecursionError) else "not JSON"


def _validated(form: _Form, message: messages.Message, text: bytes) -> messages.Message:
    if form.validator is None or (fault := form.validator(message, text)) is None:
        return message
    request_id = getattr(message, "request_id", getattr(message, "transfer_id", ""))
    raise BadMessage(fault, form.kind, request_id)


_objects = msgspec.json.Decoder(dict[str, Raw])
_objects_of_any = msgspec.json.Decoder(dict[str, Any])
_layers = msgspec.json.Decoder(_Layer)
_ids = msgspec.json.Decoder(_Ids)


def _form(kind: str, payload: type[messages.Message]) -> _Form:
    layer = msgspec.defstruct("layer", [("payload", payload)], rename={"payload": "_0"})
    outer = msgspec.defstruct(
        "outer", [("layer", layer)], rename={"layer": kind}, forbid_unknown_fields=True
    )
    return _Form(
        kind,
        msgspec.json.Decoder(payload),
        msgspec.json.Decoder(outer),
        _VALIDATORS.get(payload),
        payload is not messages.ModelTransferChunk,
        f'{{"{kind}":{{"_0":'.encode(),
        f'{{"{kind}":'.encode(),
    )


_FORMS: Mapping[bytes, _Form] = {
    kind.encode(): _form(kind, payload) for kind, payload in messages.KINDS.items()
}
_FORMS_BY_TYPE: Mapping[type, _Form] = {
    payload: _FORMS[kind.encode()] for kind, payload in messages.KINDS.items()
}
