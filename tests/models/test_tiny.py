"""The tiny model is the one that its README describes."""

import hashlib
from pathlib import Path

HERE = Path(__file__).parent


def test_file_matches_its_documented_digest() -> None:
    data = (HERE / "tiny.gguf").read_bytes()
    readme = (HERE / "README.md").read_text(encoding="utf-8")

    assert f"`{hashlib.sha256(data).hexdigest()}`" in readme
    assert f"{len(data):,} bytes" in readme
