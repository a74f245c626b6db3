"""The context that joins the spans of one trace across processes.

Source: W3C Trace Context (2021), section 3.2, "traceparent Header".
"""

import hashlib
import re
from dataclasses import dataclass

from shoal.domain.ids import JobId, LeaseNumber

SPAN_ID_DIGITS = 16
TEXT_MAX = 256  # characters of a header; later versions may be longer than 55

_SAMPLED = 1  # flag
_FIRST_VERSION = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII)
_LATER_VERSION = re.compile(
    r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in its trace; its text is the value of the header.

    Both ids are hexadecimal, in lower case.  ``sampled``: its spans are recorded.
    """

    trace_id: str
    span_id: str
    sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


def read_traceparent(text: str) -> TraceContext | None:
    """Parse the value of the header; None if it is invalid."""
    if len(text) > TEXT_MAX:
        return None
    first = text.startswith("00")
    found = (_FIRST_VERSION if first else _LATER_VERSION).fullmatch(text)
    if found is None:
        return None
    trace_id, span_id, flags = found.groups()
    if not (trace_id.strip("0") and span_id.strip("0")):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def attempt_traceparent(parent: str, job_id: JobId, lease: LeaseNumber) -> str:
    """Return the context of an attempt at a job, as a child of the job's.

    It follows from the lease: so no other state is needed.  An invalid
    ``parent`` gives "".
    """
    context = read_traceparent(parent)
    if context is None:
        return ""
    named = f"{parent} {job_id} {lease}".encode(errors="surrogatepass")
    span_id = hashlib.sha256(named).hexdigest()[:SPAN_ID_DIGITS]
    return str(TraceContext(context.trace_id, span_id, context.sampled))
