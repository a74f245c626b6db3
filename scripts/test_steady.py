"""Run a command of pytest several times, in random orders, beside busy loops.

    python scripts/test_steady.py --rounds 3 -- python -m pytest -m "not long"

Each round has an order of its own, and prints the seed that makes it again:
``pytest -p randomly --randomly-seed=SEED``.  It ends with 1 if a round fails.
"""

import argparse
import random
import subprocess
import sys
import time

LOOPS = 4  # busy processes beside the tests
LOOP = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the first round (default: random)")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    first = random.randrange(2**31) if arguments.seed is None else arguments.seed
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(LOOPS)]
    failed = []
    try:
        for seed in range(first, first + arguments.rounds):
            order = ["-p", "randomly", f"--randomly-seed={seed}"]
            began = time.monotonic()
            if subprocess.call([*arguments.command, *order]):
                failed.append(seed)
            print(f"seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for loop in loops:
            loop.kill()
    if failed:
        sys.exit(f"failed with the seeds {', '.join(map(str, failed))}")


if __name__ == "__main__":
    main()
