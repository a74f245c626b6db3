"""Pairs a worker with the user who gave it a code, once it has joined."""

import asyncio

from shoal.cli.whereto import Target
from shoal.domain.errors import ConfigError, NotAdmitted, Unavailable
from shoal.protocols import discover
from shoal.transports.http import ask_json
from shoal.worker.agent import Happening

PAIR_LIMIT = 10.0  # seconds for the coordinator to answer


def check_pairing(there: Target) -> None:
    """Raise ConfigError if the wire has no pairing codes."""
    if there.protocol.pairing is None:
        names = [each.name for each in discover().values() if each.pairing is not None]
        raise ConfigError(
            f"--pairing-code: the wire {there.protocol.name} has no such codes; "
            f"--wire {' or '.join(names)} has"
        )


async def pair_up(there: Target, code: str, public_key: bytes) -> Happening:
    """Present a pairing code; return whether the worker is paired, or why not.

    Whatever comes of it, the worker goes on: it does the jobs that are for everyone.
    """
    pairing = there.protocol.pairing
    assert pairing is not None, "checked before"
    try:
        async with asyncio.timeout(PAIR_LIMIT):
            answer = await ask_json(
                there.web + pairing.path,
                pairing.claim(code, public_key),
                fingerprint=there.fingerprint,
            )
        return Happening("paired", f"trusted by {pairing.user(answer)}")
    except NotAdmitted as error:
        return Happening("unpaired", f"--pairing-code: {error}")
    except TimeoutError:
        return Happening("unpaired", f"no answer within {PAIR_LIMIT:g} s; join again")
    except Unavailable as error:
        return Happening("unpaired", f"{error}; join again")
