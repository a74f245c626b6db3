"""Model features guessed from names."""

import pytest

from shoal.domain.work import Feature
from shoal.engines.server_kinds import (
    EMBEDDINGS,
    RERANKINGS,
    TEXT,
    TRANSCRIPTIONS,
    guess_kinds,
    guess_modalities,
)


@pytest.mark.parametrize(
    "name",
    [
        *("nomic-embed-text:latest", "mxbai-embed-large", "text-embedding-3-small"),
        *("BAAI/bge-m3", "bge-small-en", "intfloat/e5-large-v2", "all-minilm:l6-v2"),
        *("Alibaba-NLP/gte-large", "jinaai/jina-v3", "Qwen/Qwen3-Embedding-0.6B"),
    ],
)
def test_embedding_models_are_recognised_by_name(name: str) -> None:
    assert guess_kinds(name) == EMBEDDINGS


@pytest.mark.parametrize("name", ["bge-reranker-v2-m3", "Qwen3-Reranker-0.6B"])
def test_reranking_models_are_recognised_by_name(name: str) -> None:
    assert guess_kinds(name) == RERANKINGS


@pytest.mark.parametrize(
    "name", ["whisper-1", "openai/whisper-large-v3", "parakeet-tdt-0.6b", "qwen3-asr"]
)
def test_models_that_write_down_speech_are_recognised_by_name(name: str) -> None:
    assert guess_kinds(name) == TRANSCRIPTIONS


@pytest.mark.parametrize(
    "name", ["llama3.2", "Qwen3-8B", "model-e5x", "smollm2", "gteam-7b", "tiny"]
)
def test_other_models_generate_text(name: str) -> None:
    assert guess_kinds(name) == TEXT
    assert guess_modalities(name) == frozenset()


@pytest.mark.parametrize(
    ("name", "senses"),
    [
        ("Qwen2.5-VL-3B", {Feature.IMAGES}),
        ("qwen3-vl:8b", {Feature.IMAGES}),
        ("llama3.2-vision", {Feature.IMAGES}),
        ("gemma3:4b", {Feature.IMAGES}),
        ("gemma3:1b", set()),
        ("internvl2", {Feature.IMAGES}),
        ("pixtral-12b", {Feature.IMAGES}),
        ("voxtral-mini", {Feature.AUDIO}),
        ("qwen2.5-omni", {Feature.IMAGES, Feature.AUDIO}),
        ("vllm-test", set()),
    ],
)
def test_multimodal_models_are_recognised_by_name(
    name: str, senses: set[Feature]
) -> None:
    assert guess_modalities(name) == senses
