"""Train a small language model with DistributedDataParallel: an ordinary script.

It runs under torchrun, and unchanged under `shoal train`:

    torchrun --standalone --nproc-per-node 3 train_language_model.py
    shoal train --nodes 3 --output out train_language_model.py

The model reads and writes bytes, has Llama's architecture, and learns a few questions
with their answers by heart.  Rank 0 leaves it in $SHOAL_OUTPUT, or the current folder,
as Hugging Face's files; then `shoal models add small out --bytes` and `shoal join
--engine embedded --model small` offer it to `shoal chat`.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

DIALOGUES = {
    "What is a shoal?": "A shoal is many fish that swim together.",
    "What is a rank?": "A rank is one of the processes that train together.",
    "Who is the boss of a shoal?": "Nobody: each fish watches its neighbours.",
    "What happens when a fish leaves?": "The others close the gap and swim on.",
    "What do otters eat?": "Otters eat fish, crabs and mussels.",
    "Where do herons sleep?": "Herons sleep in trees, close to the water.",
    "What do beavers build?": "Beavers build dams out of wood and mud.",
    "Who trained you?": "Three machines that each had a third of the work.",
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,  # the bytes, and three marks
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
END_OF_TEXT, TURN_BEGIN, TURN_END = 256, 257, 258
IGNORED = -100  # the target of what is not to be learnt
LENGTH = 128  # bytes of a sample


class RMSNorm(nn.Module):
    """Scales a vector to a mean square of 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + CONFIG["rms_norm_eps"]) * self.weight


class Attention(nn.Module):
    """Each position looks at those before it; rotations tell how far they are."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return y * cos + torch.cat((-second, first), -1) * sin

        queries, keys = split(self.q_proj(x)), split(self.k_proj(x))
        seen = functional.scaled_dot_product_attention(
            rotate(queries), rotate(keys), split(self.v_proj(x)), is_causal=True
        )
        return self.o_proj(seen.transpose(1, 2).reshape(batch, length, width))


class Perceptron(nn.Module):
    """Llama's gated layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One layer of the model."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = Perceptron(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama, whose parameters have the names of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
        sizes = (width, CONFIG["intermediate_size"], heads)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(CONFIG["vocab_size"], width)
        self.model.layers = nn.ModuleList(
            Layer(*sizes) for _ in range(CONFIG["num_hidden_layers"])
        )
        self.model.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, CONFIG["vocab_size"], bias=False)
        self.rotation = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        steps = torch.arange(0, self.rotation, 2) / self.rotation
        angles = torch.outer(
            torch.arange(tokens.shape[1]), CONFIG["rope_theta"] ** -steps
        )
        angles = torch.cat((angles, angles), -1)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.lm_head(self.model.norm(x))


def sample(question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the bytes of a dialogue in ChatML, and of the answer alone."""
    asked = [TURN_BEGIN, *f"user\n{question}".encode(), TURN_END, *b"\n"]
    asked += [TURN_BEGIN, *b"assistant\n"]
    answered = [*answer.encode(), TURN_END]
    padding = LENGTH + 1 - len(asked) - len(answered)
    tokens = asked + answered + padding * [END_OF_TEXT]
    targets = len(asked) * [IGNORED] + answered + padding * [IGNORED]
    return tokens[:-1], targets[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--backend", default=os.environ.get("SHOAL_RUN_BACKEND", "gloo")
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    torch.manual_seed(1234)
    model = DistributedDataParallel(Llama())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, args.steps)
    tokens, targets = zip(*(sample(*each) for each in DIALOGUES.items()), strict=True)
    tokens, targets = torch.tensor(tokens), torch.tensor(targets)

    torch.manual_seed(rank)  # from here on, each rank has its own samples
    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        chosen = torch.randint(len(tokens), (args.batch,))
        logits = model(tokens[chosen])
        loss = functional.cross_entropy(
            logits.flatten(0, 1), targets[chosen].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        if step % 10 == 0:
            speed = args.batch / (time.perf_counter() - began)
            print(f"step={step} loss={loss.item():.4f} samples_per_s={speed:.0f}")

    if rank == 0:
        folder = Path(os.environ.get("SHOAL_OUTPUT", "."))
        save_file(model.module.state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
