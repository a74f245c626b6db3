"""Writes a trained Llama model as GGUF, for the embedded engine.

The tensors have Hugging Face's names, as ``LlamaForCausalLM`` of transformers gives
them, and the configuration is that of its ``config.json``.  The file is llama.cpp's
architecture ``llama``, by its own writer (PyPI's ``gguf``, in the extra ``train``).
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.engines.gguf_vocabulary import TOKENIZER, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

CONFIG = "config.json"
ARCHITECTURE = "LlamaForCausalLM"
ROPE_BASE = 10_000.0  # of transformers' LlamaConfig, if none is given
EPSILON = 1e-6  # the same
CONTEXT = 2048  # tokens; the same

Precision: TypeAlias = Literal["f16", "f32"]
"""How matrices are stored; vectors are float32 in any case."""

Tensors: TypeAlias = Mapping[str, Any]
"""Tensors of PyTorch, or arrays, by Hugging Face's names."""

_TENSORS: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_TENSORS: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Computed from the configuration, and stored by old versions only.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# Prefixes that DistributedDataParallel and torch.compile add to a name.
_WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers that describe a Llama model."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # numbers of a head
    vocabulary: int
    context: int  # tokens
    epsilon: float
    rope_base: float
    tied: bool  # the output matrix is the embedding

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "LlamaShape":
        """Read a configuration.  Raises InvalidRequest for other architectures."""
        _check_architecture(config)
        try:
            width, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                config["num_hidden_layers"],
                width,
                config["intermediate_size"],
                heads,
                config.get("num_key_value_heads") or heads,
                config.get("head_dim") or width // heads,
                config["vocab_size"],
                config.get("max_position_embeddings", CONTEXT),
                config.get("rms_norm_eps", EPSILON),
                _rope_base(config),
                config.get("tie_word_embeddings", False),
            )
        except KeyError as missing:
            raise InvalidRequest(f"the model's configuration lacks {missing}") from None

    def names(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield each tensor's name there, its name in GGUF, and its shape."""
        inner, kv = self.heads * self.head, self.kv_heads * self.head
        shapes: Mapping[str, tuple[int, ...]] = {
            "token_embd": (self.vocabulary, self.width),
            "output": (self.vocabulary, self.width),
            "output_norm": (self.width,),
            "attn_norm": (self.width,),
            "attn_q": (inner, self.width),
            "attn_k": (kv, self.width),
            "attn_v": (kv, self.width),
            "attn_output": (self.width, inner),
            "ffn_norm": (self.width,),
            "ffn_gate": (self.hidden, self.width),
            "ffn_up": (self.hidden, self.width),
            "ffn_down": (self.width, self.hidden),
        }
        for name, ours in _TENSORS.items():
            if not (self.tied and ours == "output"):
                yield f"{name}.weight", f"{ours}.weight", shapes[ours]
        for layer in range(self.layers):
            for name, ours in _LAYER_TENSORS.items():
                there = f"model.layers.{layer}.{name}.weight"
                yield there, f"blk.{layer}.{ours}.weight", shapes[ours]


def write_gguf(
    path: Path,
    tensors: Tensors,
    config: Mapping[str, Any],
    vocabulary: Vocabulary,
    *,
    name: str = "",
    precision: Precision = "f16",
) -> Path:
    """Write a Llama model, and return the path; replaces a file that is there.

    The file appears when it is whole.  One tensor at a time is in memory twice.

    Args:
        path: the file; its folder must exist.
        tensors: the parameters, as ``model.state_dict()``; of any float dtype.
        config: the contents of ``config.json``.
        vocabulary: ``byte_vocabulary()``, or that of ``read_vocabulary``.
        name: the model's name, for people; the file's stem by default.
        precision: how matrices are stored.

    Raises InvalidRequest if the model is not a Llama model, tensors are missing,
    unknown or of another shape, or numbers exceed float16; OSError if the disk is full.
    """
    import numpy as np

    shape = LlamaShape.of(config)
    by_name = _checked(tensors, shape, vocabulary)
    matrix = np.dtype(np.float16 if precision == "f16" else np.float32)
    partial = path.with_name(f".{path.name}.partial")
    with ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        writer = _writer(partial, name or path.stem, shape, vocabulary, precision)
        stack.callback(writer.close)
        for _, ours, dimensions in shape.names():
            dtype = np.dtype(np.float32) if len(dimensions) == 1 else matrix
            size = int(np.prod(dimensions)) * dtype.itemsize
            writer.add_tensor_info(ours, dimensions, dtype, size)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for there, ours, dimensions in shape.names():
            numbers = _as_float32(by_name[there])
            if heads := _rotated_heads(ours, shape):
                numbers = rotate_halves(numbers, heads)
            dtype = np.dtype(np.float32) if len(dimensions) == 1 else matrix
            writer.write_tensor_data(_as_stored(numbers, dtype, there))
        writer.flush()
        writer.close()
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    return path


def write_gguf_of_folder(
    path: Path, folder: Path, *, vocabulary: Vocabulary | None = None
) -> Path:
    """Write the model of a folder with Hugging Face's files, as ``write_gguf`` does.

    That is ``config.json``, ``*.safetensors`` and ``tokenizer.json``, as
    ``save_pretrained`` leaves them.  ``vocabulary`` replaces the last one.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"{folder / CONFIG}: no such file; give a folder with the files that "
            "save_pretrained writes"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder / CONFIG}: {error}") from error
    LlamaShape.of(config)  # other architectures have other tokenizers, too
    if vocabulary is None:
        if not (folder / TOKENIZER).exists():
            raise InvalidRequest(
                f"{folder} has no {TOKENIZER}: if its tokens are plain bytes, say so "
                "(--bytes)"
            )
        vocabulary = read_vocabulary(folder, config)
    with _opened(folder) as tensors:
        return write_gguf(path, tensors, config, vocabulary)


def rotate_halves(matrix: "Array", heads: int) -> "Array":
    """Reorder the rows of a query or key matrix as llama.cpp rotates them.

    Transformers rotates number i of a head with number i + half of it, llama.cpp number
    2 i with 2 i + 1.  Source: llama.cpp, ``convert_hf_to_gguf.py``,
    ``LlamaModel.permute``.
    """
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    reordered: Array = halves.swapaxes(1, 2).reshape(rows, columns)
    return reordered


def _check_architecture(config: Mapping[str, Any]) -> None:
    """Raise InvalidRequest unless llama.cpp's architecture ``llama`` is this one."""
    named = config.get("architectures") or []
    kind = config.get("model_type", "")
    if ARCHITECTURE not in named and (named or kind != "llama"):
        shown = ", ".join(named) or kind or "no architecture"
        raise InvalidRequest(
            f"the configuration names {shown}, and only {ARCHITECTURE} can be written "
            "as GGUF here; llama.cpp's convert_hf_to_gguf.py supports more"
        )
    for field, expected in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
    ):
        if (found := config.get(field, expected)) != expected:
            raise InvalidRequest(
                f"{field} is {found!r}, and only {expected!r} can be written as GGUF "
                "here"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    if scaling != "default":
        raise InvalidRequest(
            f"rope of type {scaling!r} cannot be written as GGUF here; llama.cpp's "
            "convert_hf_to_gguf.py can"
        )


def _rope_base(config: Mapping[str, Any]) -> float:
    # transformers 5 has it in ``rope_parameters``.
    parameters = config.get("rope_parameters") or {}
    base = parameters.get("rope_theta") or config.get("rope_theta") or ROPE_BASE
    return float(base)


def _checked(
    tensors: Tensors, shape: LlamaShape, vocabulary: Vocabulary
) -> Mapping[str, Any]:
    """Return the tensors by their names.  Raises InvalidRequest if some do not fit."""
    by_name = {
        _WRAPPERS.sub("", name): tensor
        for name, tensor in tensors.items()
        if not _DERIVED.search(name)
    }
    if shape.tied:
        by_name.pop("lm_head.weight", None)
    expected = {there: dimensions for there, _, dimensions in shape.names()}
    if missing := sorted(expected.keys() - by_name.keys()):
        raise InvalidRequest(f"the model lacks {_some(missing)}")
    if unknown := sorted(by_name.keys() - expected.keys()):
        raise InvalidRequest(f"a Llama model has no {_some(unknown)}")
    for name, dimensions in expected.items():
        if (found := tuple(by_name[name].shape)) != dimensions:
            raise InvalidRequest(
                f"{name} has shape {found}; by the configuration it is {dimensions}"
            )
    if len(vocabulary.tokens) != shape.vocabulary:
        raise InvalidRequest(
            f"the vocabulary has {len(vocabulary.tokens)} tokens, and the model "
            f"{shape.vocabulary}"
        )
    return by_name


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _writer(
    path: Path,
    name: str,
    shape: LlamaShape,
    vocabulary: Vocabulary,
    precision: Precision,
) -> Any:
    """Return llama.cpp's writer, with everything but the tensors."""
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(
        LlamaFileType.MOSTLY_F16 if precision == "f16" else LlamaFileType.ALL_F32
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.rule)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([int(kind) for kind in vocabulary.kinds])
    writer.add_token_merges(list(vocabulary.merges))
    writer.add_add_bos_token(vocabulary.begins_texts)
    if vocabulary.begin is not None:
        writer.add_bos_token_id(vocabulary.begin)
    if vocabulary.end is not None:
        writer.add_eos_token_id(vocabulary.end)
    writer.add_chat_template(vocabulary.chat_template)
    return writer


def _rotated_heads(name: str, shape: LlamaShape) -> int:
    """Return the heads of a matrix whose rows are rotated; 0: they are not."""
    if name.endswith("attn_q.weight"):
        return shape.heads
    return shape.kv_heads if name.endswith("attn_k.weight") else 0


def _as_float32(tensor: Any) -> "Array":
    """Return a tensor of PyTorch, or an array, as float32 numbers."""
    import numpy as np

    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().float().numpy()
    numbers: Array = np.ascontiguousarray(tensor, np.float32)
    return numbers


def _as_stored(numbers: "Array", dtype: "np.dtype[Any]", name: str) -> "Array":
    import numpy as np

    with np.errstate(over="ignore"):
        stored = numbers.astype(dtype)
    if not np.isfinite(stored).all():
        largest = float(np.abs(numbers).max())
        raise InvalidRequest(
            f"{name} has numbers that {dtype} cannot have: the largest is {largest:g}"
        )
    return stored


@contextmanager
def _opened(folder: Path) -> Iterator[Tensors]:
    """Yield the tensors of a folder, within a block.  Raises InvalidRequest."""
    from safetensors import SafetensorError, safe_open

    # A checkpoint has the optimizer's tensors beside those of the model.
    found = [*folder.glob("model*.safetensors")] or [*folder.glob("*.safetensors")]
    files = sorted(found)
    if not files:
        raise InvalidRequest(f"{folder} has no *.safetensors")
    tensors: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                # Of mapped memory: nothing is read yet.
                tensors |= {
                    name: opened.get_tensor(name) for name in sorted(opened.keys())
                }
            except (SafetensorError, OSError) as error:
                raise InvalidRequest(f"{file}: {error}") from error
        yield tensors
