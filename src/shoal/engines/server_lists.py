"""What servers tell of their models, each in its own words; the rest is skipped."""

from typing import Any

import msgspec

MODELS_MAX = 256  # models of one server that are looked at
CONTEXT_MAX = 2**31 - 1  # tokens
NAME_MAX = 256  # characters; wires carry no longer names


class Entry(msgspec.Struct, frozen=True):
    """A model in the list that all servers have; most tell no more than its name."""

    id: str
    owned_by: Any = None
    max_model_len: Any = None
    context_window: Any = None  # so Groq, Together and others
    type: Any = None
    loaded_context_length: Any = None
    capabilities: Any = None


class Models(msgspec.Struct, frozen=True):
    data: tuple[Entry, ...] | None


class Tag(msgspec.Struct, frozen=True):
    name: str
    digest: str = ""
    remote_host: str = ""


class Tags(msgspec.Struct, frozen=True):
    models: tuple[Tag, ...] | None


class Settings(msgspec.Struct, frozen=True):
    n_ctx: int = 0


class Props(msgspec.Struct, frozen=True):
    """What llama-server says of itself."""

    default_generation_settings: Settings
    total_slots: int = 0
    modalities: dict[str, Any] = {}
    chat_template_caps: dict[str, Any] | None = None


def offerable(name: str) -> bool:
    """Say whether a model can be offered under this name."""
    return 0 < len(name) <= NAME_MAX and name.isprintable()


def file_stem(name: str) -> str:
    """Return the name of a model that is called by the path of its file."""
    if not name.endswith(".gguf"):
        return name
    return name.replace("\\", "/").rpartition("/")[2].removesuffix(".gguf") or name


def context_of(entry: Entry) -> int:
    """Return the tokens of a context, as far as the server is sure of them.

    LM Studio's ``max_context_length`` is what the model was made for; it is loaded with
    less, and says with how much once it is.
    """
    told = (entry.max_model_len, entry.context_window, entry.loaded_context_length)
    return next((tokens for each in told if (tokens := tokens_in(each))), 0)


def tokens_in(number: Any) -> int:
    whole = isinstance(number, int) and not isinstance(number, bool)
    return number if whole and 0 < number <= CONTEXT_MAX else 0


def num_ctx(parameters: Any) -> int:
    """Read the context from Ollama's parameters of a model, one a line.

    Where it is not set there, it depends on the server's settings, which nothing tells.
    """
    lines = parameters.splitlines() if isinstance(parameters, str) else ()
    for line in lines:
        name, _, value = line.partition(" ")
        if name == "num_ctx" and value.strip().isdecimal():
            return tokens_in(int(value.strip()[:10]))
    return 0
