"""Trained models as GGUF, in the real engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from msgspec.structs import replace
from safetensors.numpy import save_file

from engines.outputs import ask, chat_of
from shoal.domain.errors import InvalidRequest
from shoal.domain.outcome import Usage
from shoal.engines.gguf_export import (
    LlamaShape,
    rotate_halves,
    write_gguf,
    write_gguf_of_folder,
)
from shoal.engines.gguf_vocabulary import byte_vocabulary
from shoal.engines.llama_engine import LlamaEngine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
Array = np.ndarray[Any, np.dtype[Any]]


def tensors(seed: int = 0, **changes: Any) -> dict[str, Array]:
    numbers = np.random.default_rng(seed)
    return {
        there: numbers.normal(0, 0.2, dimensions).astype(np.float32)
        if len(dimensions) == 2
        else np.ones(dimensions, np.float32)
        for there, _, dimensions in LlamaShape.of({**CONFIG, **changes}).names()
    }


def test_file_has_all_tensors_and_the_configuration(tmp_path: Path) -> None:
    trained = tensors()
    wrapped = {f"module.{name}": each for name, each in trained.items()}

    path = write_gguf(tmp_path / "m.gguf", wrapped, CONFIG, byte_vocabulary())

    found = GGUFReader(path)
    by_name = {each.name: each for each in found.tensors}
    assert len(by_name) == 3 + 2 * 9
    assert (
        by_name["blk.1.ffn_down.weight"].data
        == trained["model.layers.1.mlp.down_proj.weight"].astype(np.float16)
    ).all()
    assert by_name["output_norm.weight"].data.dtype == np.float32
    assert found.fields["llama.attention.head_count_kv"].contents() == 2
    assert found.fields["tokenizer.ggml.eos_token_id"].contents() == 258
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


def test_a_tied_model_has_no_output_matrix(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    trained = tensors()  # PyTorch's state has the matrix under both names

    path = write_gguf(
        tmp_path / "m.gguf", trained, config, byte_vocabulary(), precision="f32"
    )

    names = {each.name for each in GGUFReader(path).tensors}
    assert "output.weight" not in names
    assert "token_embd.weight" in names


def test_rows_are_reordered_from_halves_to_pairs() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)

    found = rotate_halves(rows, 2)

    assert found[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "names Qwen3ForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "names gpt2"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope of type 'llama3'"),
        ({"vocab_size": 300}, r"embed_tokens.weight has shape \(259, 32\)"),
    ],
)
def test_other_architectures_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidRequest, match=error):
        write_gguf(
            tmp_path / "m.gguf", tensors(), {**CONFIG, **changes}, byte_vocabulary()
        )

    assert [*tmp_path.iterdir()] == []


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    trained = tensors()

    def error(changed: dict[str, Array]) -> str:
        with pytest.raises(InvalidRequest) as raised:
            write_gguf(path, changed, CONFIG, byte_vocabulary())
        return str(raised.value)

    norm = "model.norm.weight"
    lacking = {name: each for name, each in trained.items() if name != norm}
    assert error(lacking) == f"the model lacks {norm}"
    assert "no model.layers.0.gate.bias" in error(
        {**trained, "model.layers.0.gate.bias": np.ones(3)}
    )
    large = np.full_like(trained["lm_head.weight"], 1e5)
    assert "lm_head.weight has numbers that float16 cannot have" in error(
        {**trained, "lm_head.weight": large}
    )
    assert [*tmp_path.iterdir()] == []


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json: no such file; give a"):
        write_gguf_of_folder(tmp_path / "m.gguf", tmp_path)


@pytest.mark.long  # it imports PyTorch
def test_a_folder_without_a_tokenizer_is_one_of_bytes_if_somebody_says_so(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), tmp_path / "model.safetensors")
    path = tmp_path / "m.gguf"

    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        write_gguf_of_folder(path, tmp_path)
    write_gguf_of_folder(path, tmp_path, vocabulary=byte_vocabulary())

    assert len(GGUFReader(path).tensors) == 3 + 2 * 9


def llama_forward(weights: dict[str, Array], tokens: list[int]) -> Array:
    """Return the logits after the last token, as transformers' Llama computes them."""
    shape = LlamaShape.of(CONFIG)
    half = shape.head // 2
    angles = np.outer(
        np.arange(len(tokens)), shape.rope_base ** (-np.arange(half) / half)
    )
    cosine, sine = (np.tile(each(angles), 2)[:, None] for each in (np.cos, np.sin))

    def norm(x: Array, name: str) -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + shape.epsilon)
        result: Array = x / scale * weights[name]
        return result

    def rotated(x: Array) -> Array:
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        result: Array = x * cosine + turned * sine
        return result

    x = weights["model.embed_tokens.weight"][tokens].astype(np.float64)
    for layer in range(shape.layers):
        own = f"model.layers.{layer}."
        h = norm(x, own + "input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{own}self_attn.{each}_proj.weight"].T).reshape(
                len(tokens), -1, shape.head
            )
            for each in "qkv"
        )
        q, k = rotated(q), rotated(k)
        k, v = (
            np.repeat(each, shape.heads // shape.kv_heads, axis=1) for each in (k, v)
        )
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(shape.head)
        scores = np.where(np.tri(len(tokens)), scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", chances, v).reshape(len(tokens), -1)
        x = x + mixed @ weights[own + "self_attn.o_proj.weight"].T
        h = norm(x, own + "post_attention_layernorm.weight")
        gate, up = (
            h @ weights[f"{own}mlp.{each}_proj.weight"].T for each in ("gate", "up")
        )
        x = (
            x
            + (gate / (1 + np.exp(-gate)) * up)
            @ weights[own + "mlp.down_proj.weight"].T
        )
    logits: Array = norm(x[-1], "model.norm.weight") @ weights["lm_head.weight"].T
    return logits


async def test_the_engine_computes_what_the_trained_model_does(tmp_path: Path) -> None:
    # Rows, heads or positions in another order would lead to other letters.
    trained = tensors(seed=3)
    letters = np.zeros((259, 1), np.float32)
    letters[ord("a") : ord("z") + 1] = 1
    trained["lm_head.weight"] *= letters
    path = write_gguf(
        tmp_path / "m.gguf", trained, CONFIG, byte_vocabulary(), precision="f32"
    )
    begin, end = 257, 258
    tokens = [begin, *b"user\nHello there", end, *b"\n", begin, *b"assistant\n"]
    prompt = len(tokens)
    for _ in range(24):
        tokens.append(int(llama_forward(trained, tokens).argmax()))

    engine = LlamaEngine("m", path)
    await engine.start()
    try:
        answer = await ask(engine, chat_of("Hello there", max_tokens=24))
    finally:
        await engine.close()

    assert answer.text == bytes(tokens[prompt:]).decode()
    assert answer.usage is not None
    assert replace(answer.usage, cached_tokens=None) == Usage(prompt, 24)
