"""What an operator decides about MacFleet: who is let in, and where nodes are."""

from dataclasses import dataclass, field

HEARTBEAT_PORT = 50051  # as real nodes have it
TRANSPORT_PORT = 50052


@dataclass(frozen=True, slots=True)
class Config:
    """How peers are let in, and where they are."""

    token: str = field(
        default="",
        metadata={
            "help": "the token of the fleet, of 8 characters or more: who has it may "
            "serve and ask; empty: the coordinator's join token"
        },
    )
    fleet: str = field(
        default="",
        metadata={
            "help": "the id of the fleet, which goes with the token (default: default)",
            "metavar": "ID",
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "an open fleet: no token and no TLS, and whoever reaches the ports "
            "may serve and ask"
        },
    )
    v1: bool = field(
        default=False,
        metadata={
            "help": "also let in peers with the handshake of the first version, which "
            "can be had without the token by whoever mirrors ours"
        },
    )
    heartbeat_port: int | None = field(
        default=None,
        metadata={
            "help": f"the port for heartbeats; 0 lets the system choose (default: "
            f"{HEARTBEAT_PORT}, or another if that is taken)"
        },
    )
    transport_port: int | None = field(
        default=None,
        metadata={
            "help": f"the port for tasks; 0 lets the system choose (default: "
            f"{TRANSPORT_PORT}, or another if that is taken)"
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "nodes to get to know where none can be looked for: HOST:PORT of "
            "their heartbeats, with commas between",
            "metavar": "ADDRESSES",
        },
    )
    browse: bool = field(
        default=True,
        metadata={"help": "look for nodes of the fleet on the local network"},
    )
    slots: int = field(
        default=4,
        metadata={
            "help": "tasks at a time for each worker that is not Shoal's: they do not "
            "say how many they take",
            "metavar": "N",
        },
    )
