"""Serves one worker's connection: a session, a driver, and a port of the hub."""

import logging

from shoal.protocols.session import CoordinatorSession
from shoal.runtime.clock import Clock
from shoal.runtime.driver import Driver
from shoal.runtime.hub import Hub
from shoal.runtime.link import Link

log = logging.getLogger("shoal.serving")


async def serve_worker(
    hub: Hub, clock: Clock, wire: str, session: CoordinatorSession, link: Link
) -> None:
    """Run a worker's session until its connection ends; the hub learns of both."""
    driver = Driver(session, link, clock, lambda event: port.heard(event))
    port = hub.connect(driver, wire)
    log.info("connected wire=%s peer=%s", wire, link.peer)
    reason = "cut off"
    try:
        end = await driver.run()
        reason = end.reason
    except Exception:
        # The session's bug, or ours: it must not take the other connections with it.
        reason = "internal error"
        log.exception("broken wire=%s peer=%s", wire, link.peer)
    finally:
        port.gone(reason)
        log.info("disconnected wire=%s peer=%s reason=%r", wire, link.peer, reason)
