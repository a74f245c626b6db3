"""TealeNet's configuration: the admission of peers, and their addresses."""

from dataclasses import dataclass, field

from shoal.domain.errors import ConfigError
from shoal.protocols.tealenet.codec.scalars import is_uuid


@dataclass(frozen=True, slots=True)
class Config:
    """The admission of peers, and their addresses.

    Raises ConfigError from the constructor for an owner that is no UUID.
    """

    passcode: str = field(
        default="",
        metadata={
            "help": "passcode of the cluster; peers that have it serve and submit jobs",
            "secret": True,
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "admission of peers without a passcode, to serve and to submit jobs"
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
    owner: str = field(
        default="",
        metadata={
            "help": "UUID of the user that this machine belongs to, for peers to show",
            "metavar": "UUID",
        },
    )

    def __post_init__(self) -> None:
        check_owner(self.owner, "--tealenet-owner")


def check_owner(owner: str, flag: str) -> None:
    """Raise ConfigError unless an owner is empty or a UUID: Macs refuse any other."""
    if owner and not is_uuid(owner):
        raise ConfigError(
            f"{flag} {owner}: expected a UUID such as "
            "550E8400-E29B-41D4-A716-446655440000"
        )
