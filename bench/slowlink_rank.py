"""A rank of bench/slowlink.py: DOCUMENTS RANK HOST PORT RUN=STEPS….

Its first line has its port and its id; it then reads the addresses of all ranks.  Rank
0 prints the results of each run.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal.protocols import discover
from shoal.training.all_reduces import Compression
from shoal.training.compression.error_feedback import ErrorFeedback
from shoal.training.group import RankGroup
from shoal.training.rank_port import GroupMembership, RankAddress, RankPort
from shoal.training.torch_diloco import DiLoCo
from shoal.transports.blocking.rank_socket import RankListener

LIMIT = 120.0  # seconds of an operation
RANKS = 2
HELD_OUT = 20_000  # characters, of which the loss is measured

CONTEXT = 16  # characters, from which the next one is predicted
CHARACTERS, EMBEDDING, HIDDEN = 128, 64, (2048, 1024)
BATCH = 64  # samples of a rank in each step
WARM_UP = 0.05  # of all steps

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
SPARSE_BETAS = (0.2, 0.999)  # top-k delays gradients; more momentum delays them again
COMPRESSIONS: dict[str, Callable[[], Compression | None]] = {
    "dense": lambda: None,
    "fp16": lambda: ErrorFeedback("fp16"),
    "int8": lambda: ErrorFeedback("int8"),
    "top-k": lambda: ErrorFeedback("topk", 0.03),
}
OUTER_MOMENTUM = 0.5  # of those tried (0, 0.5, 0.8, 0.9) the best for 60 outer steps


def main() -> None:
    documents, rank, host, port = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    torch.set_num_threads(1)
    wire = next(each.ranks for each in discover().values() if each.ranks)
    ranks = RankPort(wire(), RankListener(host, int(port)), encrypts=False)
    print(json.dumps({"port": ranks.port, "id": ranks.id}), flush=True)
    addresses = json.loads(sys.stdin.readline())
    links = ranks.open_group(GroupMembership("bench", 0, rank, RANKS, "bench"), LIMIT)
    links.set_addresses({r: RankAddress(*each) for r, each in enumerate(addresses)})
    group = RankGroup(links, LIMIT, on_close=ranks.close)
    for each in sys.argv[5:]:
        name, _, steps = each.partition("=")
        row = train(name, int(steps), group, corpus(documents))
        if rank == 0:
            print(json.dumps({"name": name, **row}), flush=True)
    group.barrier()
    group.close()


def train(name: str, steps: int, group: RankGroup, text: Tensor) -> dict[str, float]:
    """Train a model anew; return its loss, and the seconds of a step."""
    training, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    torch.manual_seed(0)
    model = NextCharacter()
    betas = SPARSE_BETAS if name == "top-k" else BETAS
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, steps, pct_start=WARM_UP, cycle_momentum=False
    )
    random = torch.Generator().manual_seed(1 + group.place.rank)
    diloco = None
    if name == "DiLoCo":
        diloco = DiLoCo(
            model, group, every=25, momentum=OUTER_MOMENTUM, compression="int8"
        )
    compression = None if diloco else COMPRESSIONS[name]()
    group.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        at = torch.randint(len(training) - CONTEXT, (BATCH,), generator=random)
        loss = model.loss(training, at)
        optimizer.zero_grad()
        loss.backward()
        if diloco is None:
            average_gradients(model, group, compression)
        optimizer.step()
        schedule.step()
        if diloco is not None:
            diloco.step()
    group.barrier()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    with torch.no_grad():
        found = model.loss(held_out, torch.arange(HELD_OUT - CONTEXT))
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "seconds": seconds / steps,
        "cpu": cpu / steps,
        "loss": float(found),
    }


def average_gradients(
    model: nn.Module, group: RankGroup, compression: Compression | None
) -> None:
    """Replace the gradients by their mean over all ranks."""
    gradients = [each.grad for each in model.parameters()]
    flat = torch.cat([each.reshape(-1) for each in gradients]).numpy()
    mean = group.all_reduce(flat, "mean", np.empty_like(flat), compression=compression)
    parts = torch.from_numpy(mean).split([each.numel() for each in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


class NextCharacter(nn.Module):
    """Predicts a character from those before it.

    Bengio and others, "A neural probabilistic language model", 2003.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, EMBEDDING)
        sizes = (CONTEXT * EMBEDDING, *HIDDEN)
        self.hidden = nn.Sequential(
            *(
                layer
                for size, following in zip(sizes, HIDDEN, strict=False)
                for layer in (nn.Linear(size, following), nn.GELU())
            )
        )
        self.output = nn.Linear(HIDDEN[-1], CHARACTERS)

    def loss(self, text: Tensor, at: Tensor) -> Tensor:
        """Return the mean loss of the characters after those at these places."""
        windows = text[at[:, None] + torch.arange(CONTEXT + 1)]
        hidden = self.hidden(self.embedding(windows[:, :-1]).flatten(1))
        return cross_entropy(self.output(hidden), windows[:, -1])


def corpus(documents: Path) -> Tensor:
    """Return the text of a folder's pages, in characters below 128."""
    pages = sorted(documents.rglob("*.md"))
    text = "".join(page.read_text() for page in pages).encode("ascii", "ignore")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


if __name__ == "__main__":
    main()
