"""The settings, and admission of nodes by the query of their upgrade request.

The parameters are ``token``, ``model``, ``max_concurrency`` and ``name``, in any order.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qsl

from shoal.domain.errors import ConfigError, NotAdmitted, Refused
from shoal.domain.settings import setting
from shoal.domain.vocabulary import Joined
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.protocols.seam.admission import AdmissionCheck, AdmissionGrant, JoinRequest
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.json_text import well_formed

PARAMETERS = ("token", "model", "max_concurrency", "name")
NAME_MAX = 256  # characters of a node name or a model name
SLOTS_MAX = 1024  # most concurrent tasks accepted from a node's offer

CLOSE_MISSING_PARAMETER = 4001
CLOSE_INVALID_TOKEN = 4002
CLOSE_BYE = 4000
BYE = "Bye"  # its text if a newer connection of the same node replaced this one
CLOSE_SILENT = 4008  # Shoal's; the original never disconnects a silent node

NO_CONTEXTS: Mapping[str, int] = {}

WARNING_HEADER = "Shoal-Warning"
"""Response header with a warning about the node's query."""

# White space and line ends (ECMA-262, sections 12.2 and 12.3).
_SPACE = " \t\n\v\f\r\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_PREFIXED = re.compile("0([xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = setting(
        "token of nodes, beside the coordinator's join token; without "
        "either, any token",
        "",
        secret=True,
    )
    max_new_tokens: int = setting(
        "limit of generated tokens: nodes drop tasks whose limit exceeds their context",
        1024,
    )
    context: tuple[str, ...] = setting(
        "context of a model's nodes, which then limits the generated "
        "tokens instead; repeatable",
        (),
        "MODEL=TOKENS",
    )
    silence: float = setting(
        "seconds of silence until a node counts as lost; nodes send a keepalive every "
        "10, or answer pings",
        30.0,
    )


def read_contexts(settings: tuple[str, ...]) -> Mapping[str, int]:
    """Return the context of each model, in tokens.

    Raises ConfigError.
    """
    contexts: dict[str, int] = {}
    for each in settings:
        model, equals, tokens = each.rpartition("=")
        if not (model and equals and tokens.isascii() and tokens.isdigit()):
            raise ConfigError(
                f"--grandsage-context {each}: expected MODEL=TOKENS, such as "
                "vicuna-7b=4096"
            )
        contexts[model] = int(tokens)
    return contexts


def read_query(query: str) -> dict[str, str]:
    """Parse form data as the original does.

    A second question mark ends it, the first of duplicate parameters counts, and
    percent signs that escape nothing are literal.
    """
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(query.partition("?")[0], keep_blank_values=True):
        parameters.setdefault(name, well_formed(value))
    return parameters


def admit(
    request: UpgradeRequest,
    admission: AdmissionCheck,
    contexts: Mapping[str, int] = NO_CONTEXTS,
) -> tuple[Joined, AdmissionGrant]:
    """Return how a node joins; ``admission`` decides whether it may.

    ``contexts`` has the contexts of models, in tokens: a node cannot announce it.

    Raises Refused with a close code of the wire.
    """
    parameters = read_query(request.query)
    if not all(parameters.get(name) for name in PARAMETERS):
        raise Refused(
            CLOSE_MISSING_PARAMETER, "Missing token, model, max_concurrency, or name"
        )
    for part in ("name", "model"):
        if len(parameters[part]) > NAME_MAX:
            raise Refused(
                CLOSE_MISSING_PARAMETER,
                f"The {part} is longer than {NAME_MAX} characters",
            )
    models = _models_of(parameters["model"])
    try:
        grant = admission(
            JoinRequest(
                parameters["token"], parameters["name"], models, request.address
            )
        )
    except NotAdmitted as error:
        raise Refused(CLOSE_INVALID_TOKEN, str(error)) from error
    slots, remark = slots_of(parameters["max_concurrency"])
    offer = Offer(
        kinds=CHAT_ONLY,
        models=models,
        slots=slots,
        context=contexts.get(parameters["model"], 0),
        remark=remark,
        needs_question=True,
    )
    identity = _identity(parameters["name"], parameters["model"])
    return Joined(identity, offer), grant


# Nodes with the same model share one set: there may be thousands.
@lru_cache(1024)
def _models_of(model: str) -> frozenset[str]:
    return frozenset({model})


def slots_of(value: str) -> tuple[int, str]:
    """Return how many tasks ``max_concurrency`` allows, and a warning or "".

    The original assigns tasks while ``count < value``, comparing as JavaScript does:
    "2.5" allows three tasks, "abc" none.
    """
    number = _number(value)
    shown = "max_concurrency=" + ascii(value[:40])[1:-1]
    if math.isnan(number):
        return 0, f"{shown} is no number"
    if number <= 0:
        return 0, f"{shown} allows no tasks"
    if number > SLOTS_MAX:
        return SLOTS_MAX, f"{shown} is more than {SLOTS_MAX}: {SLOTS_MAX} is used"
    return math.ceil(number), ""


def _number(value: str) -> float:
    """Convert text to a number as JavaScript does (ECMAScript, StringToNumber)."""
    text = value.strip(_SPACE)
    if not text:
        return 0.0
    if text.lstrip("+-") == "Infinity" and len(text) <= len("+Infinity"):
        return -math.inf if text.startswith("-") else math.inf
    if _PREFIXED.fullmatch(text):
        number = int(text, 0)
        return float(number) if number <= SLOTS_MAX else math.inf
    return float(text) if _DECIMAL.fullmatch(text) else math.nan


def _identity(name: str, model: str) -> str:
    # The original joins model and name by a dash, so node "b-c" of model "a" and node
    # "c" of model "a-b" replace each other.
    quoted = name.replace("%", "%25").replace("/", "%2F")
    return f"{quoted}/{model}"
