"""What each kind of server supports, and what a model's name says about it.

Source: the servers' documentation, in ``docs/engines.md``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import ServedModel

TEXT = frozenset({JobKind.CHAT, JobKind.COMPLETION})
EMBEDDINGS = frozenset({JobKind.EMBEDDING})

_BASIC = frozenset({Feature.OPTIONS, Feature.STOP})
_FULL_TEXT = _BASIC | {
    Feature.TOOLS,
    Feature.SCHEMA,
    Feature.LOGPROBS,
    Feature.CHOICES,
}
MULTIMODAL = frozenset({Feature.IMAGES, Feature.AUDIO})
"""What a model must be made for, whatever the server can do."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server.

    ``ignores`` are options that it passes over in silence, so that its answer would be
    to another request.
    """

    name: str
    features: frozenset[Feature]
    slots: int = 4  # jobs at a time as it is delivered; more wait in its own queue
    ignores: frozenset[str] = frozenset()


OLLAMA = ServerKind(
    "Ollama",
    _BASIC | {Feature.TOOLS, Feature.SCHEMA} | MULTIMODAL,
    slots=1,
    ignores=frozenset({"echo", "best_of", "logit_bias"}),
)
LLAMA_SERVER = ServerKind(
    "llama-server",
    _FULL_TEXT | MULTIMODAL,
    ignores=frozenset({"echo", "best_of", "suffix"}),
)
VLLM = ServerKind("vLLM", _FULL_TEXT | MULTIMODAL, slots=32)
SGLANG = ServerKind("SGLang", _FULL_TEXT | MULTIMODAL, slots=32)
LM_STUDIO = ServerKind(
    "LM Studio",
    _BASIC | {Feature.TOOLS, Feature.SCHEMA} | MULTIMODAL,
    ignores=frozenset({"echo", "best_of", "suffix"}),
)
MLX = ServerKind(
    "MLX",
    _BASIC | {Feature.TOOLS},
    ignores=frozenset({"echo", "best_of", "suffix"}),
)
# Whoever names a server as OpenAI-compatible is believed: what it refuses is passed on,
# and choices that it leaves out are noticed.
UNKNOWN = ServerKind("OpenAI-compatible", _FULL_TEXT | MULTIMODAL)

OWNERS = {
    "llamacpp": LLAMA_SERVER,
    "vllm": VLLM,
    "sglang": SGLANG,
    "library": OLLAMA,
    "organization_owner": LM_STUDIO,
}
"""Flavours by the ``owned_by`` that they write into their lists of models."""

# Names of models that are made for it, as their publishers choose them.
_EMBEDS = re.compile(
    r"embed|(^|[-_/.:])(bge|e5|gte|minilm|jina-v|nomic-v)(?![a-z])", re.IGNORECASE
)
_SEES = re.compile(
    r"vision|llava|pixtral|minicpm-?[vo]|internvl|moondream|smolvlm|gemma-?3-?n?[-:]"
    r"(?!270m|1b)|llama-?4|mistral-small-?3|(^|[-_/.:0-9])v[il]m?(?![a-z])|omni",
    re.IGNORECASE,
)
_HEARS = re.compile(r"audio|omni|voxtral|ultravox", re.IGNORECASE)


def guess_kinds(name: str) -> frozenset[JobKind]:
    """Guess what a model is for."""
    return EMBEDDINGS if _EMBEDS.search(name) else TEXT


def guess_modalities(name: str) -> frozenset[Feature]:
    """Guess what a model takes beyond text."""
    senses = {Feature.IMAGES: _SEES, Feature.AUDIO: _HEARS}
    return frozenset(each for each, names in senses.items() if names.search(name))


def describe_model(
    flavour: ServerKind,
    name: str,
    *,
    kinds: Iterable[JobKind] | None = None,
    lacks: Iterable[Feature] = (),
    senses: Iterable[Feature] | None = None,
    context: int = 0,
) -> ServedModel:
    """Describe a model of a server; what is not told is guessed from its name.

    ``lacks`` is what the server could do with another model; ``context`` as in Model.
    """
    told = frozenset(kinds) if kinds is not None else guess_kinds(name)
    if told <= EMBEDDINGS:
        return ServedModel(name, told, context=context)
    takes = frozenset(senses) if senses is not None else guess_modalities(name)
    features = (flavour.features - MULTIMODAL - frozenset(lacks)) | (
        takes & flavour.features
    )
    return ServedModel(name, told, features, context)
