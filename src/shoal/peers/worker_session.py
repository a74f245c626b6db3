"""Serves one worker's connection: a session, a driver and a port of the hub."""

import logging

from shoal.coordinator.hub import Hub
from shoal.protocols.seam.session import CoordinatorEnd
from shoal.transports.clock import Clock
from shoal.transports.driver import Driver
from shoal.transports.link import Link

log = logging.getLogger("shoal.serving")


async def serve_worker(
    hub: Hub, clock: Clock, wire: str, session: CoordinatorEnd, link: Link
) -> None:
    """Run a worker's session until its connection ends; the hub learns of both."""
    driver = Driver(session, link, clock, lambda event: port.on_event(event))
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
        port.on_disconnect(reason)
        log.info("disconnected wire=%s peer=%s reason=%r", wire, link.peer, reason)
