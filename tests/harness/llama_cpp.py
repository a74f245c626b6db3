"""Where llama.cpp's own programs are, for tests of models in several shards."""

import os
from pathlib import Path

FOLDER = Path(
    os.environ.get("SHOAL_LLAMA_CPP")
    or Path(__file__).parents[2] / "build" / "llama.cpp"
)


def llama_cpp() -> Path:
    """Return the folder of the programs, which `make test-long` installs."""
    assert FOLDER.exists(), (
        f"{FOLDER} is missing: python scripts/install_llama_cpp.py {FOLDER}, or name "
        "the folder of llama.cpp's programs in SHOAL_LLAMA_CPP"
    )
    return FOLDER
