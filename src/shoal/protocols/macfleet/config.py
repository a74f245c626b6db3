"""MacFleet settings: the token, ports, peers and discovery."""

from dataclasses import dataclass, field

HEARTBEAT_PORT = 50051  # MacFleet's default
TRANSPORT_PORT = 50052


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of MacFleet."""

    token: str = field(
        default="",
        metadata={
            "help": "token of the fleet, 8 characters or more; its holders may serve "
            "and submit jobs; empty: the join token (--join-token, --token)",
            "secret": True,
        },
    )
    fleet: str = field(
        default="",
        metadata={
            "help": "id of the fleet; together with the token it makes the fleet's key "
            "(default: default)",
            "metavar": "ID",
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "open fleet: no token and no TLS; everyone who can reach the ports "
            "may serve and submit jobs"
        },
    )
    tls: bool = field(
        default=False,
        metadata={
            "help": "TLS in an open fleet, as MacFleet's --tls; fleets with a token "
            "always use it"
        },
    )
    v1: bool = field(
        default=False,
        metadata={
            "help": "also accept the version 1 handshake, which a reflection attack "
            "can pass without the token"
        },
    )
    heartbeat_port: int | None = field(
        default=None,
        metadata={
            "help": "port for heartbeats; 0: the system chooses (default: "
            f"{HEARTBEAT_PORT}, or another if that is in use)"
        },
    )
    transport_port: int | None = field(
        default=None,
        metadata={
            "help": "port for tasks; 0: the system chooses (default: "
            f"{TRANSPORT_PORT}, or another if that is in use)"
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "nodes to contact where discovery does not work: HOST:PORT of "
            "their heartbeats, separated by commas",
            "metavar": "ADDRESSES",
        },
    )
    browse: bool = field(
        default=True,
        metadata={"help": "discover nodes of the fleet on the local network"},
    )
    slots: int = field(
        default=4,
        metadata={
            "help": "concurrent tasks for each worker: MacFleet's workers do not "
            "report a number",
            "metavar": "N",
        },
    )
