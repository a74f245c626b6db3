"""The tiny models are the ones that their README describes."""

import hashlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name", ["tiny.gguf", "tools/tools.gguf", "tools/mmproj-tools.gguf"]
)
def test_file_matches_its_documented_digest(name: str) -> None:
    data = (HERE / name).read_bytes()
    readme = (HERE / "README.md").read_text(encoding="utf-8")

    assert f"`{hashlib.sha256(data).hexdigest()}`" in readme
    assert f"{len(data):,} bytes" in readme
