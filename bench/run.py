"""``make bench NAME=…``: runs one bench and prints a table and a line of JSON."""

import importlib
import json
import platform
import statistics
import sys
from pathlib import Path

BENCHES = ("grandsage", "startup")


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHES:
        print(f"make bench NAME=…: one of {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path(__file__).parent))
    bench = importlib.import_module(name)
    print(f"{bench.__doc__}\n")
    results: dict[str, list[float]] = bench.measure()
    width = max(map(len, results))
    for what, values in results.items():
        median = statistics.median(values)
        spread = f"{min(values):.4g} to {max(values):.4g}"
        print(f"{what:{width}}  {median:10.4g}   ({spread}, {len(values)} runs)")
    print(
        json.dumps(
            {
                "bench": name,
                "python": platform.python_version(),
                "median": {k: statistics.median(v) for k, v in results.items()},
                "values": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
