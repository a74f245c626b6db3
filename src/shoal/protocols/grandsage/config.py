"""GrandSage settings: the token of nodes, and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.domain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = field(
        default="",
        metadata={
            "help": "token of nodes, beside the coordinator's join token; without "
            "either, any token",
            "secret": True,
        },
    )
    max_new_tokens: int = field(
        default=1024,
        metadata={
            "help": "limit of generated tokens at nodes: they drop "
            "tasks whose limit exceeds their context"
        },
    )
    context: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "context of a model's nodes, which then limits the generated "
            "tokens instead; repeatable",
            "metavar": "MODEL=TOKENS",
        },
    )
    silence: float = field(
        default=30.0,
        metadata={
            "help": "seconds of silence until a node counts as lost; nodes send a "
            "keepalive every 10, and those that send none must answer pings"
        },
    )


def read_contexts(settings: tuple[str, ...]) -> Mapping[str, int]:
    """Return the context of each model, in tokens.

    Raises ConfigError.
    """
    contexts: dict[str, int] = {}
    for each in settings:
        model, equals, tokens = each.rpartition("=")
        if not (model and equals and tokens.isascii() and tokens.isdigit()):
            raise ConfigError(
                f"--grandsage-context {each}: expected MODEL=TOKENS, such as "
                "vicuna-7b=4096"
            )
        contexts[model] = int(tokens)
    return contexts
