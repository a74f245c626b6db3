"""Presents the pairing code of a worker to its coordinator."""

import asyncio

from shoal.cli.worker.join_target import JoinTarget
from shoal.domain.errors import ConfigError, NotAdmitted, Unavailable
from shoal.protocols import discover
from shoal.transports.http_client import request_json
from shoal.worker.agent import WorkerEvent

PAIR_TIMEOUT = 10.0  # seconds for the coordinator to answer


def pairing_wires() -> list[str]:
    """Return the names of the wires that support pairing codes."""
    return [each.name for each in discover().values() if each.pairing is not None]


def check_pairing(target: JoinTarget) -> None:
    """Raise ConfigError if the wire does not support pairing codes."""
    if target.protocol.pairing is None:
        names = pairing_wires()
        raise ConfigError(
            f"--pairing-code: the wire {target.protocol.name} has no pairing codes; "
            f"use --wire {' or '.join(names)}"
        )


async def pair_worker(target: JoinTarget, code: str, public_key: bytes) -> WorkerEvent:
    """Present a pairing code; return whether the worker is paired, or why not.

    Without pairing, the worker serves only jobs that are not private.
    """
    pairing = target.protocol.pairing
    assert pairing is not None, "check_pairing raises"
    try:
        async with asyncio.timeout(PAIR_TIMEOUT):
            answer = await request_json(
                target.http_url + pairing.path,
                pairing.claim(code, public_key),
                fingerprint=target.fingerprint,
            )
        return WorkerEvent("paired", f"trusted by {pairing.user(answer)}")
    except NotAdmitted as error:
        return WorkerEvent("unpaired", f"--pairing-code: {error}")
    except TimeoutError:
        return WorkerEvent(
            "unpaired", f"no answer within {PAIR_TIMEOUT:g} s; join again"
        )
    except Unavailable as error:
        return WorkerEvent("unpaired", f"{error}; join again")
