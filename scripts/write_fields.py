"""Write ``docs/protocols/fields.md``; print what is wrong about the fields, if any.

python scripts/write_fields.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from protocols.fields.page import PAGE, page  # noqa: E402
from protocols.fields.wire import WIRES, wire  # noqa: E402

PAGE.write_text(page())
sys.exit("\n".join(fault for name in WIRES for fault in wire(name).faults()) or 0)
