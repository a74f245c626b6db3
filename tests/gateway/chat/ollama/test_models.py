"""Ollama's names and descriptions of the pool's models."""

import msgspec
import pytest

from shoal.domain.work import Feature, JobKind
from shoal.gateway.chat.ollama.models import (
    capabilities,
    described_model,
    listed_model,
    loaded_model,
    resolve_model,
)
from shoal.gateway.models.listing import ModelSummary

MODEL = ModelSummary(
    "qwen3:8b",
    frozenset({JobKind.CHAT, JobKind.COMPLETION}),
    frozenset({Feature.TOOLS, Feature.IMAGES, Feature.STOP}),
    *(8192, 2, 4),
)


@pytest.mark.parametrize(
    ("name", "models", "found"),
    [
        ("m1", {"m1"}, "m1"),
        ("m1", {"m1:latest"}, "m1:latest"),
        ("m1", {"m1", "m1:latest"}, "m1"),
        ("m1:latest", {"m1"}, "m1"),
        ("m1:latest", {"m1", "m1:latest"}, "m1:latest"),
        ("m1:8b", {"m1"}, "m1:8b"),
        ("org/m1", {"org/m1:latest"}, "org/m1:latest"),
        ("m2", {"m1"}, "m2"),
    ],
)
def test_the_tag_latest_may_be_left_out(
    name: str, models: set[str], found: str
) -> None:
    assert resolve_model(name, models) == found


@pytest.mark.parametrize(
    ("name", "aliases", "found"),
    [
        ("m1", {"m1"}, "m1:latest"),  # a model of the name wins
        ("gpt:latest", {"gpt"}, "gpt"),
        ("gpt", {"gpt:latest"}, "gpt:latest"),
        ("m2", {"gpt"}, "m2"),
    ],
)
def test_aliases_come_after_models(name: str, aliases: set[str], found: str) -> None:
    assert resolve_model(name, {"m1:latest"}, aliases) == found


def test_a_model_is_listed_with_all_that_clients_read() -> None:
    listed = msgspec.to_builtins(listed_model(MODEL, 1_700_000_000.0))
    loaded = msgspec.to_builtins(loaded_model(MODEL))

    assert listed["name"] == listed["model"] == loaded["name"] == "qwen3:8b"
    assert listed["modified_at"] == "2023-11-14T22:13:20.000Z"
    assert len(listed["digest"]) == 64
    assert listed["digest"] == loaded["digest"]
    assert listed["details"]["families"] == []
    assert loaded["context_length"] == 8192


def without_context(model: ModelSummary) -> ModelSummary:
    return ModelSummary(model.name, model.kinds, model.features, 0, 1, 1)


def test_a_description_has_the_context_where_clients_look_for_it() -> None:
    shown = described_model(MODEL, 0.0)
    unknown = described_model(without_context(MODEL), 0.0)

    architecture = shown.model_info["general.architecture"]
    assert shown.model_info[f"{architecture}.context_length"] == 8192
    assert shown.parameters == "num_ctx 8192"
    assert shown.capabilities == ["completion", "tools", "vision"]
    assert unknown.parameters == ""
    assert f"{architecture}.context_length" not in unknown.model_info


def test_a_model_of_embeddings_completes_nothing() -> None:
    kinds, none = frozenset({JobKind.EMBEDDING}), frozenset[Feature]()

    assert capabilities(ModelSummary("e", kinds, none, 0, 1, 1)) == ["embedding"]
