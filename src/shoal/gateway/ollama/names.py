"""Models' names: with Ollama, a name without a tag has the tag ``latest``.

Source: Ollama's API reference, "Model names".
"""

from collections.abc import Collection

LATEST = ":latest"


def resolve_model(name: str, models: Collection[str]) -> str:
    """Return the model of the pool that a client means.

    It is the name itself, or the one with or without ``:latest``; if none of them is a
    model, the name.
    """
    if name in models:
        return name
    bare = name.removesuffix(LATEST)
    other = f"{name}{LATEST}" if bare == name else bare
    return other if other in models else name
