"""Write ``docs/settings.md``, every setting, from the classes that declare them.

python scripts/write_settings.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from cli.settings_page import PAGE, page  # noqa: E402


def main() -> None:
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
