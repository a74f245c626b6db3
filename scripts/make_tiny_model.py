"""Make the models that the tests run: llamas that learnt tables of answers by heart.

Each has two layers of 64 and a vocabulary of bytes and printable ASCII, so that every
answer is produced one character (or one byte) at a time.  Written for numpy, with the
derivatives by hand: there is little to install, and a quarter of a minute to wait.

    python scripts/make_tiny_model.py [tiny|tools] [--output FILE]

The seed is fixed.  Two runs on one machine give the same bytes; another machine may
round differently and give other weights with the same answers.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "models"
sys.path.insert(0, str(ROOT / "tests"))

# The tests are no installed package.
from models.tiny_answers import ANSWERS  # noqa: E402
from models.tool_answers import CHATS, COLOURS, PATCHES  # noqa: E402

WIDTH, LAYERS, HEADS, HIDDEN = 64, 2, 4, 160
HEAD = WIDTH // HEADS
CONTEXT = 2048
ROPE_BASE = 10000.0
EPSILON = 1e-5
SHARPNESS = np.float32(HEAD**-0.5)
RATE = 0.01  # of Adam, at its highest
SURE = 0.95  # the least chance that every token of every answer must have

QKV = ("attn_q", "attn_k", "attn_v")
BLOCK = {  # the weights of a layer, by the names and shapes (out, in) that GGUF has
    "attn_norm": (WIDTH,),
    **dict.fromkeys((*QKV, "attn_output"), (WIDTH, WIDTH)),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (HIDDEN, WIDTH),
    "ffn_up": (HIDDEN, WIDTH),
    "ffn_down": (WIDTH, HIDDEN),
}

UNKNOWN, BEGIN, END = 0, 1, 2
FIRST_BYTE, FIRST_CHAR = 3, 3 + 256
ASCII = [chr(code) for code in range(32, 127)]
MARKS = START_MARK, END_MARK = "<|start|>", "<|end|>"
START_TURN = FIRST_CHAR + len(ASCII)
END_TURN = START_TURN + 1
VOCABULARY = END_TURN + 1

GENERATION = (
    f"{{% if add_generation_prompt %}}{{{{ '{START_MARK}assistant\\n' }}}}{{% endif %}}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file, its chat template, and what to write after each prompt of that."""

    file: str
    template: str
    lessons: Mapping[str, str]


RECIPES = {
    "tiny": Recipe(
        "tiny.gguf",
        "{% for m in messages %}"
        f"{{{{ '{START_MARK}' + m['role'] + '\\n' + m['content'] + '{END_MARK}\\n' }}}}"
        "{% endfor %}" + GENERATION,
        {
            f"{START_MARK}user\n{question}{END_MARK}\n{START_MARK}assistant\n": answer
            for question, answer in ANSWERS.items()
        },
    ),
    # Of a tool it shows the name only: prompts are then the same for every client.
    "tools": Recipe(
        "tools/tools.gguf",
        f"{{% if tools %}}{{{{ '{START_MARK}tools\\n' }}}}{{% for tool in tools %}}"
        "{{ tool.function.name + '\\n' }}{% endfor %}"
        f"{{{{ '{END_MARK}\\n' }}}}{{% endif %}}"
        "{% for m in messages %}"
        f"{{{{ '{START_MARK}' + m.role + '\\n' }}}}"
        "{% if m.reasoning_content %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{% if m.content %}{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}"
        '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \''
        " + (call.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}"
        f"{{{{ '{END_MARK}\\n' }}}}{{% endfor %}}" + GENERATION,
        CHATS,
    ),
}

Array: TypeAlias = npt.NDArray[np.floating]  # single precision throughout
Weights: TypeAlias = dict[str, Array]  # by the names that GGUF uses


# The text


def tokens_of(text: str) -> list[int]:
    """Return ``text`` as llama.cpp would cut it: a mark, a character, or its bytes."""
    tokens: list[int] = []
    for part in re.findall(
        f"{re.escape(START_MARK)}|{re.escape(END_MARK)}|.", text, re.S
    ):
        if part in MARKS:
            tokens.append(START_TURN + MARKS.index(part))
        elif part in ASCII:
            tokens.append(FIRST_CHAR + ASCII.index(part))
        else:
            tokens += [FIRST_BYTE + byte for byte in part.encode()]
    return tokens


# The network: what each part gives, and below it the slopes of what it was given


def rms_norm(x: Array, gain: Array) -> tuple[Array, Array]:
    """Return the normalised rows of ``x``, shape (n, WIDTH), and their scales."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPSILON)
    return x * scale * gain, scale


def rms_norm_back(
    slope: Array, x: Array, gain: Array, scale: Array
) -> tuple[Array, Array]:
    """Return the slopes of ``x`` and of ``gain``."""
    scaled = x * scale
    inner = slope * gain
    mean = np.mean(inner * scaled, axis=1, keepdims=True)
    return scale * (inner - scaled * mean), np.sum(slope * scaled, axis=0)


def rotate(x: Array, angles: Array, direction: int = 1) -> Array:
    """Turn neighbouring pairs of ``x``, shape (heads, n, HEAD), by their position.

    Interleaved pairs are what llama.cpp expects of the llama architecture, so Q and K
    are stored unpermuted.  The derivative is the turn in the other direction.
    """
    cos, sin = np.cos(angles), direction * np.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned


def split_heads(x: Array) -> Array:
    return x.reshape(len(x), HEADS, HEAD).transpose(1, 0, 2)


def join_heads(x: Array) -> Array:
    return x.transpose(1, 0, 2).reshape(x.shape[1], WIDTH)


def softmax(x: Array) -> Array:
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    shares: Array = powers / np.sum(powers, axis=-1, keepdims=True)
    return shares


@dataclass(frozen=True, slots=True)
class Attended:
    """What ``attend`` keeps of one chat for its derivative; shapes begin with HEADS."""

    q: Array
    k: Array
    v: Array
    shares: Array
    angles: Array


def attend(q: Array, k: Array, v: Array) -> tuple[Array, Attended]:
    """Let each row look at itself and the rows before it; the rows are one chat."""
    length = len(q)
    steps = ROPE_BASE ** (-np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)
    angles = np.arange(length, dtype=np.float32)[:, None] * steps
    q, k = rotate(split_heads(q), angles), rotate(split_heads(k), angles)
    v = split_heads(v)
    scores = q @ k.transpose(0, 2, 1) * SHARPNESS
    scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    shares = softmax(scores)
    return join_heads(shares @ v), Attended(q, k, v, shares, angles)


def attend_back(slope: Array, was: Attended) -> tuple[Array, Array, Array]:
    """Return the slopes of q, k and v."""
    heads = split_heads(slope)
    v = was.shares.transpose(0, 2, 1) @ heads
    shares = heads @ was.v.transpose(0, 2, 1)
    scores = was.shares * (shares - np.sum(shares * was.shares, axis=2, keepdims=True))
    scores *= SHARPNESS
    q = rotate(scores @ was.k, was.angles, -1)
    k = rotate(scores.transpose(0, 2, 1) @ was.q, was.angles, -1)
    return join_heads(q), join_heads(k), join_heads(v)


@dataclass(frozen=True, slots=True)
class Passed:
    """What ``block`` keeps of one layer for its derivative; rows are all chats."""

    x: Array
    normed: Array
    scale: Array
    attended: list[Attended]
    seen: Array
    middle: Array
    normed2: Array
    scale2: Array
    gate: Array
    up: Array


def block(x: Array, w: Weights, chats: list[slice]) -> tuple[Array, Passed]:
    """Run one layer."""
    normed, scale = rms_norm(x, w["attn_norm"])
    q, k, v = (normed @ w[name].T for name in QKV)
    parts = [attend(q[chat], k[chat], v[chat]) for chat in chats]
    seen = np.concatenate([part for part, _ in parts])
    middle = x + seen @ w["attn_output"].T
    normed2, scale2 = rms_norm(middle, w["ffn_norm"])
    gate, up = normed2 @ w["ffn_gate"].T, normed2 @ w["ffn_up"].T
    attended = [kept for _, kept in parts]
    out = middle + gate * sigmoid(gate) * up @ w["ffn_down"].T
    return out, Passed(
        x, normed, scale, attended, seen, middle, normed2, scale2, gate, up
    )


def block_back(
    slope: Array, w: Weights, chats: list[slice], was: Passed
) -> tuple[Array, Weights]:
    """Return the slopes of the layer's input and of its weights."""
    mine: Weights = {}
    bend = sigmoid(was.gate)
    mine["ffn_down"] = slope.T @ (was.gate * bend * was.up)
    hidden = slope @ w["ffn_down"]
    up = hidden * was.gate * bend
    gate = hidden * was.up * bend * (1 + was.gate * (1 - bend))
    mine["ffn_gate"], mine["ffn_up"] = gate.T @ was.normed2, up.T @ was.normed2
    normed2 = gate @ w["ffn_gate"] + up @ w["ffn_up"]
    more, mine["ffn_norm"] = rms_norm_back(
        normed2, was.middle, w["ffn_norm"], was.scale2
    )
    slope = slope + more

    mine["attn_output"] = slope.T @ was.seen
    seen = slope @ w["attn_output"]
    parts = [
        attend_back(seen[chat], kept)
        for chat, kept in zip(chats, was.attended, strict=True)
    ]
    normed = np.zeros_like(slope)
    for name, pieces in zip(QKV, zip(*parts, strict=True), strict=True):
        piece = np.concatenate(pieces)
        mine[name] = piece.T @ was.normed
        normed += piece @ w[name]
    more, mine["attn_norm"] = rms_norm_back(normed, was.x, w["attn_norm"], was.scale)
    return slope + more, mine


def sigmoid(x: Array) -> Array:
    result: Array = 1 / (1 + np.exp(-x))
    return result


# The training


@dataclass(frozen=True, slots=True)
class Batch:
    """All chats end to end: tokens and targets of shape (n,), -1 where none is."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    chats: list[slice]


def batch_of(lessons: Mapping[str, str]) -> Batch:
    """Lay out every prompt with its answer, of which alone the tokens are targets."""
    tokens: list[int] = []
    targets: list[int] = []
    chats = []
    for text, answer in lessons.items():
        prompt, written = [BEGIN, *tokens_of(text)], [*tokens_of(answer), END_TURN]
        chats.append(slice(len(tokens), len(tokens) + len(prompt) + len(written) - 1))
        tokens += prompt + written[:-1]
        targets += [-1] * (len(prompt) - 1) + written
    return Batch(np.array(tokens), np.array(targets), chats)


def layer_of(weights: Weights, layer: int) -> Weights:
    return {name: weights[f"blk.{layer}.{name}"] for name in BLOCK}


def learn(weights: Weights, batch: Batch) -> tuple[Array, Weights]:
    """Return the chance given to each target and the slopes of the mean loss."""
    table = weights["token_embd"]
    x = table[batch.tokens]
    trail = []
    for layer in range(LAYERS):
        x, passed = block(x, layer_of(weights, layer), batch.chats)
        trail.append(passed)
    out, scale = rms_norm(x, weights["output_norm"])
    asked = batch.targets >= 0
    shares = softmax(out[asked] @ table.T)
    right = (np.arange(len(shares)), batch.targets[asked])
    chances = shares[right]

    shares[right] -= 1
    shares /= len(shares)
    slopes: Weights = {"token_embd": shares.T @ out[asked]}
    slope = np.zeros_like(out)
    slope[asked] = shares @ table
    slope, slopes["output_norm"] = rms_norm_back(
        slope, x, weights["output_norm"], scale
    )
    for layer in reversed(range(LAYERS)):
        slope, mine = block_back(
            slope, layer_of(weights, layer), batch.chats, trail[layer]
        )
        slopes |= {f"blk.{layer}.{name}": value for name, value in mine.items()}
    np.add.at(slopes["token_embd"], batch.tokens, slope)
    return chances, slopes


def fresh_weights(seed: int) -> Weights:
    """Return untrained weights; matrices have the shape (out, in)."""
    random = np.random.default_rng(seed)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in BLOCK.items()}
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def train(lessons: Mapping[str, str], seed: int, steps: int) -> Weights:
    """Learn ``lessons`` by heart (Adam: Kingma and Ba, 2015).

    Raises SystemExit if a token of an answer stays doubtful.
    """
    weights, batch = fresh_weights(seed), batch_of(lessons)
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    for step in range(1, steps + 1):
        chances, slopes = learn(weights, batch)
        rate = RATE * min(1, step / 50) * (1 + np.cos(np.pi * step / steps)) / 2
        for name, slope in slopes.items():
            first[name] = 0.9 * first[name] + 0.1 * slope
            second[name] = 0.98 * second[name] + 0.02 * slope * slope
            mean = first[name] / (1 - 0.9**step)
            spread = np.sqrt(second[name] / (1 - 0.98**step)) + 1e-8
            weights[name] = weights[name] - np.float32(rate) * mean / spread
        if step % 100 == 0:
            loss = -np.mean(np.log(chances))
            print(f"step {step}: loss {loss:.5f}, least sure {chances.min():.4f}")
    rounded = {name: as_stored(value) for name, value in weights.items()}
    chances, _ = learn(
        {name: value.astype(np.float32) for name, value in rounded.items()}, batch
    )
    print(f"as stored: least sure {chances.min():.4f}")
    if chances.min() < SURE:
        raise SystemExit(f"an answer is not learnt: {chances.min():.4f} < {SURE}")
    return rounded


def as_stored(value: Array) -> Array:
    """Matrices are stored in half precision; llama.cpp wants its vectors in full."""
    stored: Array = value if value.ndim == 1 else value.astype(np.float16)
    return stored


# The file


def write(weights: Weights, name: str, template: str, path: Path) -> None:
    """Write the model as GGUF; a missing output matrix means the embedding's."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_license("Apache-2.0")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_vocabulary(writer)
    writer.add_chat_template(template)
    for tensor, value in weights.items():
        writer.add_tensor(f"{tensor}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PATCH = 14  # pixels in a row of one
IMAGE = PATCH * int(PATCHES**0.5)  # pixels in a row
VISION = 32  # numbers for a patch
LEVEL = 10.0  # where GELU is the identity


def write_projector(letters: Array, path: Path) -> None:
    """Write a vision encoder that shows each patch of an image to the model.

    A patch becomes the sum of its colours' ``letters``, the embeddings of shape
    (3, WIDTH), each times its mean intensity.  The layer of the encoder adds nothing,
    and the projector (LLaVA's: two matrices with GELU between them) mixes the letters.
    """
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_license("Apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_projection_dim(WIDTH)
    writer.add_vision_image_size(IMAGE)
    writer.add_vision_patch_size(PATCH)
    writer.add_vision_embedding_length(VISION)
    writer.add_vision_feed_forward_length(VISION)
    writer.add_vision_block_count(1)
    writer.add_vision_head_count(2)
    writer.add_vision_attention_layernorm_eps(EPSILON)
    writer.add_vision_use_gelu(True)
    writer.add_vision_image_mean([0.0] * 3)
    writer.add_vision_image_std([1.0] * 3)
    zeros = np.zeros((VISION, VISION), np.float32)
    ones = np.ones(VISION, np.float32)
    means = np.zeros((VISION, 3, PATCH, PATCH), np.float32)
    raised = zeros.copy()
    mixed = np.zeros((WIDTH, VISION), np.float32)
    for colour, letter in enumerate(letters):
        means[colour, colour] = 1 / PATCH**2
        raised[colour, colour] = LEVEL
        mixed[:, colour] = letter / LEVEL
    writer.add_tensor("v.class_embd", zeros[0])
    writer.add_tensor("v.patch_embd.weight", means)
    writer.add_tensor("v.position_embd.weight", zeros[: PATCHES + 1])
    for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down"):
        writer.add_tensor(f"v.blk.0.{part}.weight", zeros)
        writer.add_tensor(f"v.blk.0.{part}.bias", zeros[0])
    for part in ("ln1", "ln2"):
        writer.add_tensor(f"v.blk.0.{part}.weight", ones)
        writer.add_tensor(f"v.blk.0.{part}.bias", zeros[0])
    writer.add_tensor("mm.0.weight", raised)
    writer.add_tensor("mm.0.bias", zeros[0])
    writer.add_tensor("mm.2.weight", mixed)
    writer.add_tensor("mm.2.bias", np.zeros(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    rows = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    rows += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    # SentencePiece writes the space as U+2581.
    rows += [(char.replace(" ", "\u2581"), kinds.NORMAL) for char in ASCII]
    rows += [(START_MARK, kinds.CONTROL), (END_MARK, kinds.CONTROL)]
    assert len(rows) == VOCABULARY
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in rows])
    writer.add_token_scores([-float(index) for index in range(len(rows))])
    writer.add_token_types([kind for _, kind in rows])
    writer.add_unk_token_id(UNKNOWN)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END_TURN)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=[*RECIPES], nargs="?", default="tiny")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    recipe = RECIPES[options.model]
    output = options.output or MODELS / recipe.file
    weights = train(recipe.lessons, options.seed, options.steps)
    write(weights, options.model, recipe.template, output)
    written = [output]
    if options.model == "tools":
        letters = weights["token_embd"][[tokens_of(each)[0] for each in COLOURS]]
        written.append(output.with_name(f"mmproj-{output.name}"))
        write_projector(letters, written[-1])
    for path in written:
        data = path.read_bytes()
        print(f"{path}: {len(data)} bytes, {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
