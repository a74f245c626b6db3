"""Ollama's lists, descriptions and names of models, with what the pool knows of them.

Source: Ollama's API reference, "List Local Models", "Show Model Information", "List
Running Models" and "Model names".
"""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shoal.domain.work import Feature, JobKind
from shoal.gateway.models.listing import ModelSummary
from shoal.ledger.canonical import to_time

VERSION = "0.14.0"
"""The version of Ollama that has what this API has; clients require a minimum."""

ARCHITECTURE = "shoal"
NEVER = "9999-12-31T23:59:59Z"  # the workers decide what they unload, and when

CAPABILITIES: Mapping[Feature, str] = {
    Feature.TOOLS: "tools",
    Feature.IMAGES: "vision",
    Feature.AUDIO: "audio",
}


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str = VERSION


class OllamaDetails(msgspec.Struct, frozen=True):
    """Details of a model's file, which the pool does not know."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the pool; ``size`` is in bytes, 0: unknown.

    ``digest`` is that of the name: clients show its beginning, or compare it.
    """

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails = OllamaDetails()


class OllamaModels(msgspec.Struct, frozen=True):
    models: list[OllamaModel]


class OllamaLoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that workers have loaded."""

    name: str
    model: str
    size: int = 0
    digest: str
    details: OllamaDetails = OllamaDetails()
    expires_at: str = NEVER
    size_vram: int = 0
    context_length: int


class OllamaLoadedModels(msgspec.Struct, frozen=True):
    models: list[OllamaLoadedModel]


class OllamaModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model; ``parameters`` has one a line."""

    modelfile: str
    parameters: str
    template: str = ""
    details: OllamaDetails = OllamaDetails()
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def listed_model(model: ModelSummary, created_at: float) -> OllamaModel:
    """Return a model for the list; ``created_at`` is as in ``Gateway``."""
    return OllamaModel(
        name=model.name,
        model=model.name,
        modified_at=to_time(created_at),
        size=model.size,
        digest=_digest(model.name),
        details=OllamaDetails(parent_model=model.alias_of),
    )


def loaded_model(model: ModelSummary) -> OllamaLoadedModel:
    """Return a model for the list of those that are loaded."""
    return OllamaLoadedModel(
        name=model.name,
        model=model.name,
        size=model.size,
        digest=_digest(model.name),
        context_length=model.context,
    )


def described_model(model: ModelSummary, created_at: float) -> OllamaModelInfo:
    """Return the description of a model; ``created_at`` is as in ``Gateway``."""
    info: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "general.basename": model.name,
    }
    parameters = ""
    if model.context:
        info[f"{ARCHITECTURE}.context_length"] = model.context
        parameters = f"num_ctx {model.context}"
    return OllamaModelInfo(
        modelfile=f"FROM {model.name}",
        parameters=parameters,
        model_info=info,
        capabilities=capabilities(model),
        modified_at=to_time(created_at),
    )


def capabilities(model: ModelSummary) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    found = []
    if model.kinds & {JobKind.CHAT, JobKind.COMPLETION}:
        found.append("completion")
    if JobKind.EMBEDDING in model.kinds:
        found.append("embedding")
    return found + [
        word for feature, word in CAPABILITIES.items() if feature in model.features
    ]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


LATEST = ":latest"


def resolve_model(name: str, *known: Collection[str]) -> str:
    """Return the model of the pool, or else the alias, that a client means.

    ``known`` are the models, and the aliases.  It is the name itself, or the one with
    or without ``:latest``; if none of them is known, the name.
    """
    bare = name.removesuffix(LATEST)
    other = f"{name}{LATEST}" if bare == name else bare
    pairs = ((each, names) for names in known for each in (name, other))
    return next((each for each, names in pairs if each in names), name)
