"""Write the table of operations in ``docs/training.md``: each is tried beside gloo."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from training.test_torch_operations import PAGE, page, tried  # noqa: E402


def main() -> None:
    PAGE.write_text(page(tried()))


if __name__ == "__main__":
    main()
