"""Telling a program's own function how far a call has come."""

import logging

from shoal.client.options import Progress

log = logging.getLogger(__name__)


def tell(progress: Progress, share: float | None, remark: str) -> None:
    """Call the program's function; what it raises is logged, and ends nothing."""
    try:
        progress(share, remark)
    except Exception:
        # It is the caller's code, in a thread that carries everybody's calls.
        log.exception("on_progress raised an error; the call goes on")
