"""A rank that trains a linear model, and lets new ranks in: FOLDER.

It writes a line for each step: the step, the hash of its parameters, and its loss.
"""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from shoal.training.meeting import join_run

NUMBERS = 20_000
RATE = 0.3
SAMPLES = 8


def main() -> None:
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    target = np.random.default_rng(0).normal(size=NUMBERS).astype(np.float32)
    group = join_run(timeout=20.0, admits=True)
    state = np.zeros(NUMBERS + 1)  # the step, and the parameters
    if group.is_new:
        group.broadcast(state, group.newest)
    with (folder / f"{rank}-{os.getpid()}").open("w", buffering=1) as steps:
        while True:
            step = int(state[0])
            group.set_step(step)
            draw = np.random.default_rng((step, rank))
            noise = draw.normal(0, 0.1, NUMBERS).astype(np.float32)
            gradient = np.empty(NUMBERS + 1, np.float32)
            gradient[1:] = state[1:].astype(np.float32) - target + noise
            gradient[0] = (folder / "stop").exists()
            group.all_reduce(gradient, "mean")
            assert np.isfinite(gradient).all()
            state[1:] -= RATE * gradient[1:]
            state[0] += 1
            digest = hashlib.sha256(state.tobytes()).digest()
            loss = float(np.square(state[1:] - target).mean())
            steps.write(f"{step + 1} {digest.hex()} {loss:.6f}\n")
            if step % 10 == 0:
                group.compare(digest)
            if gradient[0]:
                break
            if group.admit():
                group.broadcast(state, group.newest)
    group.close()


if __name__ == "__main__":
    main()
