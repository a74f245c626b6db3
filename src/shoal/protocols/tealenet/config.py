"""What an operator decides about TealeNet: who is let in, and where peers are."""

from dataclasses import dataclass, field

from shoal.domain.errors import ConfigError

FORMS = ("wrapped", "flat")


@dataclass(frozen=True, slots=True)
class Config:
    """How peers are let in, and where they are.

    Raises ConfigError from the constructor for a form that there is not.
    """

    token: str = field(
        default="",
        metadata={
            "help": "what workers present as their token; empty: the coordinator's "
            "join token"
        },
    )
    passcode: str = field(
        default="",
        metadata={
            "help": "the cluster's passcode: peers that have it serve and ask, and on "
            "the local network no others are let in, but for workers with a token"
        },
    )
    open: bool = field(
        default=False,
        metadata={
            "help": "let peers in that have neither a token nor a passcode, to serve "
            "and to ask"
        },
    )
    lan: bool = field(
        default=True,
        metadata={"help": "listen for peers on a TCP port of its own, and announce it"},
    )
    port: int = field(
        default=0,
        metadata={"help": "that port; 0 lets the system choose"},
    )
    browse: bool = field(
        default=False,
        metadata={"help": "look for peers on the local network, and connect to them"},
    )
    peers: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "peers to connect to where none can be looked for: HOST:PORT, with "
            "commas between",
            "metavar": "ADDRESSES",
        },
    )
    relays: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "relays to take part in: wss://HOST/ws, with commas between",
            "metavar": "URLS",
        },
    )
    form: str = field(
        default="wrapped",
        metadata={
            "help": "how messages are written: wrapped, as all real peers read them, "
            "or flat, as the document has them",
            "metavar": "FORM",
        },
    )

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(
                f"--tealenet-form {self.form}: expected {' or '.join(FORMS)}"
            )

    @property
    def flat(self) -> bool:
        """Whether messages are written without the layer ``_0``."""
        return self.form == "flat"
