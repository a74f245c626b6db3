"""Presents the pairing code of a worker to its coordinator."""

import asyncio

from shoal.cli.worker.join_target import JoinTarget
from shoal.domain.errors import ConfigError, NotAdmitted, Unavailable
from shoal.protocols import discover
from shoal.protocols.seam.protocol import Pairing
from shoal.transports.http_client import request_json
from shoal.worker.agent import WorkerEvent

PAIR_TIMEOUT = 10.0  # seconds for the coordinator to answer


def pairing_at(target: JoinTarget) -> Pairing:
    """Return how to present pairing codes to a coordinator.

    Shoal's answer as those of the wire that has them, whatever wire is joined by.

    Raises ConfigError if the wire does not support them.
    """
    wire = target.protocol
    having = [each for each in discover().values() if each.pairing is not None]
    pairing = having[0].pairing if wire.preferred else wire.pairing
    if pairing is None:
        names = " or ".join(each.name for each in having)
        raise ConfigError(
            f"--pairing-code: the protocol {wire.name} has no pairing codes; use "
            f"--wire {names}, or leave --wire out for a coordinator of `shoal serve`"
        )
    return pairing


async def pair_worker(target: JoinTarget, code: str, public_key: bytes) -> WorkerEvent:
    """Present a pairing code; return whether the worker is paired, or why not.

    Without pairing, the worker serves only jobs that are not private.
    """
    pairing = pairing_at(target)
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
