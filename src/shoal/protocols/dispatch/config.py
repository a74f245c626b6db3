"""Dispatch settings: admission of workers, and trust in their claims."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of the wire."""

    token: str = field(
        default="",
        metadata={
            "help": "token of workers, beside the coordinator's join token",
            "secret": True,
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "admission of Dispatch clients and workers without a key or token"
        },
    )
    model: str = field(
        default="dispatch",
        metadata={"help": "model name for workers that report none"},
    )
    silence: float = field(
        default=30.0,
        metadata={
            "help": "seconds of silence until a worker counts as lost; workers send a "
            "heartbeat every 10"
        },
    )
    trust_unproven: bool = field(
        default=False,
        metadata={
            "help": "private jobs also for workers that name a trusted key without "
            "proof, as in the original; anyone can do that"
        },
    )
