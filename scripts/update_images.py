"""Copy the pictures that the pages show from the screenshots of the browser's tests.

Each picture in a page is ``docs/images/NAME.png``; the tests leave ``NAME.png`` in
``build/screenshots``.

    python scripts/update_images.py
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
SCREENSHOTS = ROOT / "build" / "screenshots"
SHOWN = re.compile(r"!\[[^]]*\]\((?:\.\./)*(?:docs/)?images/([\w-]+\.png)\)")


def main() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {name for page in pages for name in SHOWN.findall(page.read_text("utf-8"))}
    missing = sorted(name for name in names if not (SCREENSHOTS / name).is_file())
    if missing:
        sys.exit(f"{SCREENSHOTS}: no {', '.join(missing)}; run the browser's tests")
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(SCREENSHOTS / name, IMAGES / name)
    print(f"{len(names)} pictures in {IMAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
