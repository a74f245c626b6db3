"""Write ``docs/protocols/fields.md`` from the codecs and ``docs/protocols/fields/``.

What is missing or obsolete goes to the standard error output, and the status is 1 then.

    python scripts/write_fields.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from protocols.fields.table import PAGE, WIRES, page, table_of  # noqa: E402


def main() -> None:
    PAGE.write_text(page())
    faults = [fault for wire in WIRES for fault in table_of(wire).faults()]
    print(*faults, sep="\n", end="\n" * bool(faults), file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
