"""GrandSage settings: the token of nodes, and limits."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = field(
        default="",
        metadata={
            "help": "token of nodes; empty: the coordinator's join token, and without "
            "that any token"
        },
    )
    max_new_tokens: int = field(
        default=1024,
        metadata={
            "help": "limit of generated tokens where the client sets none, for nodes "
            "that require one"
        },
    )
    silence: float = field(
        default=30.0,
        metadata={
            "help": "seconds of silence until a node counts as lost; nodes send a "
            "keepalive every 10"
        },
    )
