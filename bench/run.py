"""``make bench NAME=…``: runs one bench and prints its tables and a line of JSON."""

import argparse
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import report
from processes import allow_files

BENCHES = (
    "affinity",
    "allreduce",
    "cold",
    "dashboard",
    "ddp",
    "gateway",
    "giant",
    "grandsage",
    "held",
    "hostile",
    "idle",
    "jobs",
    "leaving",
    "page",
    "placement",
    "plan",
    "scaleout",
    "slowlink",
    "startup",
    "steps",
    "store",
    "takeover",
    "tasks",
    "tealenet",
    "tealenet_streams",
    "transfer",
    "transport",
    "wire",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench NAME=…", description=__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--rounds", type=int, help="instead of the bench's own number")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"keep the results: in {report.PAGE.name}, or steps.json",
    )
    args = parser.parse_args()
    allow_files()
    bench = importlib.import_module(args.name)
    print(f"{bench.__doc__}\n")
    results = bench.measure(args.rounds or bench.ROUNDS)
    text = report.tables(results, bench.GOALS)
    print(text)
    print(report.line(args.name, results))
    if args.write and args.name == "steps":
        bench.keep()  # for a test to compare; days and machines do not differ
    elif args.write:
        report.write(args.name, bench.__doc__, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
