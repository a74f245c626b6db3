"""Features of each kind of server, and guesses from a model's name.

Source: the servers' documentation, in ``docs/engines.md``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import ServedModel

TEXT = frozenset({JobKind.CHAT, JobKind.COMPLETION})
EMBEDDINGS = frozenset({JobKind.EMBEDDING})
RERANKINGS = frozenset({JobKind.RERANK})
TRANSCRIPTIONS = frozenset({JobKind.TRANSCRIPTION})
NO_TEXT = EMBEDDINGS | RERANKINGS | TRANSCRIPTIONS
"""What models do that generate no text from text."""

_BASIC = frozenset({Feature.OPTIONS, Feature.STOP})
_FULL_TEXT = _BASIC | {
    Feature.TOOLS,
    Feature.SCHEMA,
    Feature.LOGPROBS,
    Feature.CHOICES,
}
_ANY_FIELD = frozenset({Feature.FIELDS})
"""Of servers with many fields that OpenAI does not have; others ignore what they do not
know, and clients would not learn that."""

MULTIMODAL = frozenset({Feature.IMAGES, Feature.AUDIO})
"""Features that depend on the model, not only on the server."""


class Way(Enum):
    """How a server continues an answer that another has begun.

    The first two give the model the very tokens that it wrote itself.  In the others
    they are a message of the assistant, which a template may trim.
    """

    TEMPLATE = "/apply-template"  # then a completion of that text
    TOKENS = "/tokenize"  # then a completion of those tokens
    FLAGS = "continue_final_message"
    MESSAGE = "a last message of the assistant"


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of server.

    ``ignores`` are options (``domain/options.py``) that it silently ignores.  The token
    limit and the temperature are not options, and every server obeys them.  Unless it
    ``chooses_tools``, it obeys "auto" and "required", and no other ``tool_choice``.
    With ``continues`` it continues messages of a client by ``Way.FLAGS``: that is
    trusted if it counts no tokens.  A model no longer offers an option that its answers
    show to be ignored.
    """

    name: str
    features: frozenset[Feature]
    slots: int = 4  # concurrent jobs by default; it queues the rest
    ignores: frozenset[str] = frozenset()
    chooses_tools: bool = True
    resident: bool = False  # all its models are loaded
    continues: bool = False


OLLAMA = ServerKind(
    "Ollama",
    _BASIC | {Feature.TOOLS, Feature.SCHEMA} | MULTIMODAL,
    slots=1,
    ignores=frozenset({"echo", "best_of", "logit_bias"}),
)
LLAMA_SERVER = ServerKind(
    "llama-server",
    _FULL_TEXT | MULTIMODAL | _ANY_FIELD,
    ignores=frozenset({"echo", "best_of", "suffix", "functions"}),
    chooses_tools=False,
    resident=True,
)
VLLM = ServerKind(
    "vLLM",
    _FULL_TEXT | MULTIMODAL | _ANY_FIELD | {Feature.ECHO},
    slots=32,
    resident=True,
    continues=True,
)
SGLANG = replace(VLLM, name="SGLang")
APHRODITE = replace(VLLM, name="Aphrodite")
LMDEPLOY = replace(VLLM, name="LMDeploy", continues=False)
LM_STUDIO = ServerKind(
    "LM Studio",
    _BASIC | {Feature.TOOLS, Feature.SCHEMA} | MULTIMODAL,
    ignores=frozenset({"echo", "best_of", "suffix"}),
)
MLX = ServerKind(
    "MLX", _BASIC | {Feature.TOOLS}, ignores=frozenset({"echo", "best_of", "suffix"})
)
TRANSFORMERS = ServerKind(
    "transformers serve",
    frozenset({Feature.STOP, Feature.TOOLS, Feature.CHOICES}) | MULTIMODAL,
    ignores=frozenset({"echo", "best_of", "suffix", "tool_choice"}),
    chooses_tools=False,
)
# An unknown server is assumed to be fully OpenAI-compatible, as long as its answers
# show it: its refusals are passed on, missing choices are made one by one, and
# ``check_heeded`` notices the rest.  A missing echo, and other fields, it would not.
UNKNOWN = ServerKind("OpenAI-compatible", _FULL_TEXT | MULTIMODAL)

OWNERS = {
    "llamacpp": LLAMA_SERVER,
    "vllm": VLLM,
    "sglang": SGLANG,
    "pygmalionai": APHRODITE,
    "lmdeploy": LMDEPLOY,
    "library": OLLAMA,
    "organization_owner": LM_STUDIO,
}
"""Kinds of servers, by ``owned_by`` in their model lists."""

# Common parts of the names of models with that feature.
_EMBEDDING_NAME = re.compile(
    r"embed|(^|[-_/.:])(bge|e5|gte|minilm|jina-v|nomic-v)(?![a-z])", re.IGNORECASE
)
_RERANK_NAME = re.compile(r"re-?rank", re.IGNORECASE)
_SPEECH_NAME = re.compile(
    r"whisper|parakeet|canary|transcri|(^|[-_/.:])asr(?![a-z])", re.IGNORECASE
)
_VISION_NAME = re.compile(
    r"vision|llava|pixtral|minicpm-?[vo]|internvl|moondream|smolvlm|gemma-?3-?n?[-:]"
    r"(?!270m|1b)|llama-?4|mistral-small-?3|(^|[-_/.:0-9])v[il]m?(?![a-z])|omni",
    re.IGNORECASE,
)
_AUDIO_NAME = re.compile(r"audio|omni|voxtral|ultravox", re.IGNORECASE)


def guess_kinds(name: str) -> frozenset[JobKind]:
    """Guess the kinds of work of a model from its name."""
    if _RERANK_NAME.search(name):
        return RERANKINGS
    if _SPEECH_NAME.search(name):
        return TRANSCRIPTIONS
    return EMBEDDINGS if _EMBEDDING_NAME.search(name) else TEXT


def guess_modalities(name: str) -> frozenset[Feature]:
    """Guess the input types of a model beyond text from its name."""
    modalities = {Feature.IMAGES: _VISION_NAME, Feature.AUDIO: _AUDIO_NAME}
    return frozenset(each for each, names in modalities.items() if names.search(name))


def describe_model(
    server: ServerKind,
    name: str,
    *,
    kinds: Iterable[JobKind] | None = None,
    lacks: Iterable[Feature] = (),
    modalities: Iterable[Feature] | None = None,
    context: int = 0,
) -> ServedModel:
    """Describe a model of a server; unreported features are guessed from its name.

    ``lacks`` are features of the server that this model lacks.
    """
    reported = frozenset(kinds) if kinds is not None else guess_kinds(name)
    if reported <= NO_TEXT:
        return ServedModel(name, reported, context=context)
    accepted = (
        frozenset(modalities) if modalities is not None else guess_modalities(name)
    )
    features = (server.features - MULTIMODAL - frozenset(lacks)) | (
        accepted & server.features
    )
    return ServedModel(name, reported, features, context)
