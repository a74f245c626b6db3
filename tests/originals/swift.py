"""JSON as Macs read and write it: strict about fields, in any order."""

import base64
import binascii
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class Dropped(Exception):
    """The Mac drops the message silently."""


Check: TypeAlias = Callable[[Any], None]


@dataclass(frozen=True)
class Optional:
    check: Check


def _is(*types: type) -> Check:
    def check(value: Any) -> None:
        if not isinstance(value, types) or (
            isinstance(value, bool) and bool not in types
        ):
            raise Dropped(f"{value!r:.40} is no {types[0].__name__}")

    return check


text, boolean, double = _is(str), _is(bool), _is(float, int)


def anything(value: Any) -> None:
    pass


def integer(value: Any) -> None:
    double(value)
    if value != int(value):
        raise Dropped(f"{value} is no integer")


def natural(value: Any) -> None:
    integer(value)
    if value < 0:
        raise Dropped(f"{value} is negative")


def uuid(value: Any) -> None:
    text(value)
    if not UUID.fullmatch(value):
        raise Dropped(f"{value!r:.40} is no UUID")


def data(value: Any) -> None:
    text(value)
    try:
        base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise Dropped("no base64") from error


def one_of(*known: str) -> Check:
    def check(value: Any) -> None:
        if value not in known:
            raise Dropped(f"{value!r:.40} is not among {known}")

    return check


def many(each: Check) -> Check:
    def check(value: Any) -> None:
        _is(list)(value)
        for item in value:
            each(item)

    return check


def fields(**checks: Check | Optional) -> Check:
    """Check an object: absent optionals may be null, unknown fields are ignored."""

    def check(value: Any) -> None:
        _is(dict)(value)
        for name, expected in checks.items():
            if isinstance(expected, Optional):
                if value.get(name) is not None:
                    expected.check(value[name])
            elif name not in value:
                raise Dropped(f"key not found: {name}")
            else:
                expected(value[name])

    return check


def flags(value: Any) -> None:
    _is(dict)(value)
    for each in value.values():
        boolean(each)


def content(value: Any) -> None:
    _is(str, list)(value)


O = Optional  # noqa: E741
models = many(text)
hardware = fields(
    chipFamily=text,
    chipName=text,
    totalRAMGB=double,
    gpuCoreCount=integer,
    memoryBandwidthGBs=double,
    gpuVRAMGB=O(double),
)
device = fields(
    id=uuid,
    name=text,
    hardware=hardware,
    registeredAt=double,
    lastSeenAt=double,
    isCurrentDevice=boolean,
    loadedModels=models,
    connectionQuality=O(
        one_of("thunderbolt", "tenGigabit", "gigabit", "wifi", "unknown")
    ),
)
hello = fields(
    deviceInfo=device,
    protocolVersion=integer,
    clusterPasscodeHash=O(text),
    loadedModels=models,
    ownerUserID=O(uuid),
)
heartbeat = fields(
    deviceID=uuid,
    timestamp=double,
    thermalLevel=one_of("nominal", "fair", "serious", "critical"),
    throttleLevel=integer,
    loadedModels=models,
    isGenerating=boolean,
    queueDepth=integer,
    organizationID=O(text),
    ownerUserID=O(uuid),
)
message = fields(
    role=text,
    content=O(content),
    name=O(text),
    tool_calls=O(anything),
    tool_call_id=O(text),
)
request = fields(
    model=O(text),
    messages=many(message),
    temperature=O(double),
    top_p=O(double),
    max_tokens=O(integer),
    stream=O(boolean),
    stop=O(many(text)),
    presence_penalty=O(double),
    frequency_penalty=O(double),
    tools=O(many(anything)),
    tool_choice=O(anything),
    stream_options=O(flags),
    group_id=O(text),
)
delta = fields(role=O(text), content=O(text), tool_calls=O(anything))
chunk = fields(
    id=text,
    object=text,
    created=integer,
    model=text,
    choices=many(fields(index=integer, delta=delta, finish_reason=O(text))),
    usage=O(
        fields(prompt_tokens=integer, completion_tokens=integer, total_tokens=integer)
    ),
)

KINDS: dict[str, Check] = {
    "hello": hello,
    "helloAck": hello,
    "heartbeat": heartbeat,
    "heartbeatAck": heartbeat,
    "inferenceRequest": fields(requestID=uuid, request=request, streaming=boolean),
    "inferenceChunk": fields(requestID=uuid, chunk=chunk),
    "inferenceComplete": fields(requestID=uuid),
    "inferenceError": fields(requestID=uuid, errorMessage=text),
    "modelQuery": fields(modelID=text),
    "modelQueryResponse": fields(
        modelID=text, available=boolean, totalSizeBytes=O(natural)
    ),
    "modelTransferRequest": fields(transferID=uuid, modelID=text),
    "modelTransferChunk": fields(
        transferID=uuid, fileName=text, offset=natural, data=data, isLastChunk=boolean
    ),
    "modelTransferComplete": fields(transferID=uuid, modelID=text),
}


def read(raw: bytes, *, flat: bool = False) -> tuple[str, dict[str, Any]]:
    """Return the kind and payload of a message.  Raises Dropped like a Mac.

    ``flat``: reads the document's form instead, and no other.
    """
    try:
        envelope = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_first)
    except ValueError as error:
        raise Dropped("no JSON") from error
    _is(dict)(envelope)
    known = [kind for kind in envelope if kind in KINDS]
    if len(known) != 1:
        raise Dropped(f"{len(known)} known keys among {list(envelope)}")
    (kind,) = known
    _is(dict)(envelope[kind])
    if ("_0" in envelope[kind]) is flat:
        raise Dropped("unexpected key: _0" if flat else "key not found: _0")
    payload: dict[str, Any] = envelope[kind] if flat else envelope[kind]["_0"]
    KINDS[kind](payload)
    return kind, payload


def write(kind: str, payload: dict[str, Any], *, flat: bool = False) -> bytes:
    """Write a message: keys in any order, ``/`` escaped, no nulls."""
    KINDS[kind](payload)
    shuffled = _shuffled({kind: payload if flat else {"_0": payload}})
    written = json.dumps(shuffled, ensure_ascii=False, separators=(",", ":"))
    return written.replace("/", "\\/").encode()


def _first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        found.setdefault(name, value)  # of duplicate keys the Mac keeps the first
    return found


def _shuffled(value: Any) -> Any:
    match value:
        case dict():
            names = [name for name in value if value[name] is not None]
            random.shuffle(names)
            return {name: _shuffled(value[name]) for name in names}
        case list():
            return [_shuffled(each) for each in value]
        case float() if value == int(value):
            return int(value)
        case _:
            return value
