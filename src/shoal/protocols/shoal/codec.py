"""The messages of Shoal's own wire: the vocabulary itself, in MessagePack.

Each class of the vocabulary, and of what it contains, is an array: its name, then its
fields.  The arrays follow from the classes, so a new field or a new kind of work needs
no line here.  A field is only ever added at the end of its class, with a default: an
older program ignores what follows the fields that it knows, and a newer one takes the
default where there is nothing.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial, reduce
from operator import attrgetter, or_
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, Union, get_args, get_origin

import msgspec

from shoal.domain import model_messages as models
from shoal.domain import vocabulary as words
from shoal.domain.errors import InvalidRequest, PeerError
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.json_limits import NESTING_MAX, is_too_deep
from shoal.domain.vocabulary import Command, Event, RunJob
from shoal.domain.worker import Hardware
from shoal.protocols.seam.json_text import well_formed

VERSION = 1

COMMANDS: frozenset[type] = frozenset(
    {
        *(words.RunJob, words.CancelJob, words.Dismiss, words.WakeMachine),
        *(words.PushCalls, words.CancelCalls, words.SendBlob),
        *(models.ModelQuery, models.ModelAnswer, models.ModelRequest),
        *(models.ModelChunk, models.ModelDone),
        *models.CHUNK_MESSAGES,
    }
)
"""What a coordinator sends to a worker."""

EVENTS: frozenset[type] = frozenset(
    {
        *(words.OffersChanged, words.LoadChanged, words.HealthReported),
        *(words.Draining, words.AnswerChunk, words.Completed, words.Rejected),
        *(words.Failed, words.CallProgress, words.CallsReturned),
        *(words.BlobMissing, words.SendBlob),
        *(models.ModelQuery, models.ModelAnswer, models.ModelRequest),
        *(models.ModelChunk, models.ModelDone),
        *models.CHUNK_MESSAGES,
    }
)
"""What a worker sends to a coordinator."""

# A worker learns neither the payer nor the recipients of notifications.  Whether a job
# may be given back depends on the other end, not on what that says.
_LEFT_OUT: Mapping[type, frozenset[str]] = {RunJob: frozenset({"terms", "returnable"})}

Convert: TypeAlias = Callable[[Any], Any]


class _Form(NamedTuple):
    """How a class is written.

    ``get`` returns the sent fields of an instance, or of a struct; ``make`` makes an
    instance of them.  ``to_wire`` and ``from_wire`` have the places of fields that are
    not written as they are.
    """

    struct: type[msgspec.Struct]
    get: Convert
    make: Callable[..., Any]
    to_wire: tuple[tuple[int, Convert], ...]
    from_wire: tuple[tuple[int, Convert], ...]


class _FieldForm(NamedTuple):
    """The type of a field on the wire; None: it is written as it is."""

    type: Any
    to_wire: Convert | None = None
    from_wire: Convert | None = None


_forms: dict[type, _Form] = {}  # by the class, and by its struct
_flat: set[type] = set()  # structs of which nothing can be nested
_FLAT = frozenset({str, int, float, bool, bytes, memoryview})


def _form_of(cls: type[msgspec.Struct]) -> _Form:
    if (known := _forms.get(cls)) is not None:
        return known
    left_out = _LEFT_OUT.get(cls, frozenset())
    names = tuple(each for each in cls.__struct_fields__ if each not in left_out)
    optional = reversed(cls.__struct_defaults__)
    defaults = dict(zip(reversed(cls.__struct_fields__), optional, strict=False))
    # Not msgspec's own look at the fields: that resolves what JSON means.
    forms = [
        _member_form(hint, defaults.get(name)) or _field_form(hint)
        for name, hint in ((each, cls.__annotations__[each]) for each in names)
    ]
    struct = msgspec.defstruct(
        cls.__name__,
        [
            (name, form.type, *([_default(defaults[name])] if name in defaults else []))
            for name, form in zip(names, forms, strict=True)
        ],
        tag=True,
        array_like=True,
        gc=False,
    )
    get = attrgetter(*names) if len(names) > 1 else _only(names[0])
    form = _Form(
        *(struct, get, partial(_make, cls, names) if left_out else cls),
        tuple((n, each.to_wire) for n, each in enumerate(forms) if each.to_wire),
        tuple((n, each.from_wire) for n, each in enumerate(forms) if each.from_wire),
    )
    _forms[cls] = _forms[struct] = form
    if all(each.type in _FLAT for each in forms):
        _flat.add(struct)
    return form


def _only(name: str) -> Convert:
    return lambda value: (getattr(value, name),)


def _make(cls: type, names: tuple[str, ...], *given: Any) -> Any:
    return cls(**dict(zip(names, given, strict=True)))


def _default(default: Any) -> Any:
    made = getattr(default, "factory", lambda: _to_wire(default))  # msgspec's own
    return msgspec.field(default_factory=made)


def _member_form(hint: Any, default: object) -> _FieldForm | None:
    """Return how a member of an enum is written; None: the field is for none.

    One that a newer program has added is read as the default.
    """
    hints = (hint, *get_args(hint))
    enum = next((e for e in hints if isinstance(e, type) and issubclass(e, Enum)), None)
    if enum is None or get_origin(hint) is frozenset:
        return None
    known = _Members(default, enum)
    return _FieldForm(str | int | None, attrgetter("value"), known.__getitem__)


class _Members(dict[Any, Any]):
    """The members of an enum by their values; any other value is the ``default``."""

    def __init__(self, default: object, enum: type[Enum]) -> None:
        super().__init__((each.value, each) for each in enum)
        self._default = default

    def __missing__(self, value: object) -> object:
        return self._default


def _field_form(hint: Any) -> _FieldForm:
    """Return how values of a type are written; JSON may be anything."""
    hint = getattr(hint, "__supertype__", hint)  # of a NewType
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _FieldForm(_form_of(hint).struct, _to_wire, _from_wire)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if memoryview in args:
            return _FieldForm(memoryview)  # read without a copy
        inner = [_field_form(each) for each in args]
        types = [each.type for each in inner]
        if not any(each.to_wire for each in inner):
            return _FieldForm(Any if Any in types else reduce(or_, types))
        return _FieldForm(reduce(or_, types), _to_wire, _from_wire)
    if origin in (tuple, list):
        inner = [_field_form(each) for each in args]
        if inner[0].to_wire is None:
            return _FieldForm(origin[tuple(each.type for each in inner)])
        items: Any = list.__class_getitem__(inner[0].type)
        return _FieldForm(items, _list_to_wire, _from_wire_as(origin))
    member = args[0] if args and isinstance(args[0], type) else object
    if origin is frozenset and issubclass(member, Enum):
        return _FieldForm(list[str], _names, _members_of(member))
    if origin is not None and issubclass(origin, Mapping):
        return _FieldForm(dict[str, Any])
    return _FieldForm(hint if isinstance(hint, type) or args or hint is ... else Any)


def _list_to_wire(values: Any) -> list[Any]:
    return [*map(_to_wire, values)]


def _from_wire_as(made: type) -> Convert:
    def convert(values: Any) -> Any:
        for each in values:
            if type(each) in _forms:
                return made(map(_from_wire, values))
        return made(values)  # as most are: only texts

    return convert


def _names(members: frozenset[Enum]) -> list[str]:
    return [each.value for each in members]


def _members_of(enum: type[Enum]) -> Convert:
    """Return what reads members by their values; those of newer programs are none."""
    known = {each.value: each for each in enum}
    return lambda values: frozenset(known[each] for each in values if each in known)


def _to_wire(value: Any) -> Any:
    """Return what is written of an object; anything else as it is."""
    if (form := _forms.get(type(value))) is None:
        return value
    given = form.get(value)
    if form.to_wire:
        given = [*given]
        for place, convert in form.to_wire:
            if given[place] is not None:
                given[place] = convert(given[place])
    return form.struct(*given)


def _from_wire(value: Any) -> Any:
    """Return the object that was written; anything else as it is."""
    if (form := _forms.get(type(value))) is None:
        return value
    given = form.get(value)
    if form.from_wire:
        given = [*given]
        for place, convert in form.from_wire:
            if given[place] is not None:
                given[place] = convert(given[place])
    return form.make(*given)


class Ping(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A sign of life."""


class Opening(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The first message of each end.

    ``key_proof`` signs the channel's binding, and ``token_proof`` proves the join token
    on it: see ``token_proof`` of the seam.  ``token`` is the token itself, on channels
    that are not encrypted.  ``models`` are those that a worker will offer once they are
    loaded.  ``release`` is that of the program.  ``window`` is how many bytes of each
    large message may be sent to this end at first; 0: it knows no streams of pieces.
    ``running`` are the jobs that a worker runs since an earlier connection, each with
    its lease; None: it keeps none when a connection is lost.  ``addresses`` are the
    URLs of the coordinators of a pool, if there are several.  ``chunks``: it knows the
    messages about models in chunks.  The end's hardware may follow.
    """

    version: int
    name: str
    is_worker: bool
    key: bytes = b""
    key_proof: bytes = b""
    token_proof: bytes = b""
    token: str = ""
    models: list[str] = []
    release: str = ""
    window: int = 0
    running: list[tuple[JobId, LeaseNumber]] | None = None
    addresses: list[str] = []
    chunks: bool = False


class Refusal(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The last message, to an end that is not admitted; ``final``: nor later."""

    reason: str
    final: bool


Message: TypeAlias = Opening | Refusal | Ping | Hardware | Command | Event

_encoder = msgspec.msgpack.Encoder(enc_hook=dict)
# No part of an array's or a map's head.
_NO_HEADS = bytes({*range(256)} - {*range(0x80, 0xA0), *range(0xDC, 0xE0)})


class MessageDecoder:
    """Decodes the messages of one end: how it begins, and these of the vocabulary."""

    def __init__(self, vocabulary: frozenset[type]) -> None:
        structs = [_form_of(each).struct for each in {Hardware} | vocabulary]
        expected: Any = reduce(or_, structs, Opening | Refusal | Ping)
        self._decode = msgspec.msgpack.Decoder(expected).decode

    def decode(self, data: bytes) -> Message:
        """Decode a message.  Raises PeerError if it is invalid."""
        try:
            message = self._decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise PeerError(f"invalid message: {error}") from error
        if (
            len(data) > NESTING_MAX
            and type(message) not in _flat
            and len(data.translate(None, _NO_HEADS)) > NESTING_MAX
            and is_too_deep(msgspec.to_builtins(message))
        ):
            raise PeerError("invalid message: nested too deeply")
        try:
            decoded: Message = _from_wire(message)
        except InvalidRequest as error:  # of what checks its values
            raise PeerError(f"invalid message: {error}") from error
        return decoded


COMMAND_DECODER = MessageDecoder(COMMANDS)
EVENT_DECODER = MessageDecoder(EVENTS)
POOL_DECODER = MessageDecoder(COMMANDS | EVENTS)


def encode(message: object) -> bytes:
    """Encode a message.

    Raises InvalidRequest if it has an integer of more than 64 bits, or is nested too
    deeply.
    """
    try:
        try:
            return _encoder.encode(_to_wire(message))
        except UnicodeEncodeError:  # half of a surrogate pair
            return _encoder.encode(_well_formed(_to_wire(message)))
    except OverflowError as error:
        raise InvalidRequest("an integer has more than 64 bits") from error
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply") from error


def _well_formed(value: Any) -> Any:
    match value:
        case str():
            return well_formed(value)
        case Mapping():
            return {_well_formed(k): _well_formed(v) for k, v in value.items()}
        case list() | tuple() | frozenset():
            return [_well_formed(each) for each in value]
        case msgspec.Struct():
            names = value.__struct_fields__
            return type(value)(*[_well_formed(getattr(value, n)) for n in names])
        case _:
            return value
