"""Ranks that ask who saves the model; rank 0 ends itself meanwhile."""

import os

import numpy as np

import shoal
from shoal.training.meeting import join_run


def main() -> None:
    before = shoal.is_writer()  # of rank 0, as its environment says
    group = join_run(timeout=20.0)
    ones = np.ones(1, np.float32)
    group.all_reduce(ones.copy())
    during = shoal.is_writer()
    if os.environ["RANK"] == "0":
        os._exit(before and during)
    group.all_reduce(ones)
    print(before, during, shoal.is_writer(), flush=True)
    group.close()


if __name__ == "__main__":
    main()
