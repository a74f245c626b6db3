"""TealeNet's configuration: the admission of peers, and their addresses."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Config:
    """The admission of peers, and their addresses."""

    token: str = field(
        default="",
        metadata={
            "help": "token that workers present to join, beside the coordinator's "
            "join token"
        },
    )
    passcode: str = field(
        default="",
        metadata={
            "help": "passcode of the cluster; peers that have it serve and submit "
            "jobs, and others on the local network need a join token"
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "admission of peers without a token or a passcode, to serve and to "
            "submit jobs"
        },
    )
    lan: bool = field(
        default=True,
        metadata={"help": "separate TCP port for peers, announced by multicast"},
    )
    port: int = field(
        default=0,
        metadata={"help": "number of that port; 0: the system chooses one"},
    )
    browse: bool = field(
        default=False,
        metadata={
            "help": "discovery of peers by multicast, and connections to those found"
        },
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "addresses of peers to connect to where multicast is blocked: "
            "HOST:PORT, separated by commas",
            "metavar": "ADDRESSES",
        },
    )
    relays: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "relays to join: wss://HOST/ws, separated by commas",
            "metavar": "URLS",
        },
    )
