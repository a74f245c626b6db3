"""Contexts of traces: W3C Trace Context, section 3.2."""

import pytest

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.trace_context import (
    TraceContext,
    attempt_traceparent,
    read_traceparent,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
TEXT = f"00-{TRACE_ID}-{SPAN_ID}-01"  # the example of the document


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (TEXT, True),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", False),
        (f"00-{TRACE_ID}-{SPAN_ID}-03", True),  # an unknown flag
        (f"cc-{TRACE_ID}-{SPAN_ID}-01", True),  # a later version
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-what-the-future-holds", True),
    ],
)
def test_valid_header_is_read(text: str, sampled: bool) -> None:
    assert read_traceparent(text) == TraceContext(TRACE_ID, SPAN_ID, sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEXT.upper(),
        TEXT + "-more",
        TEXT + "\n",
        TEXT.replace("00-", "ff-", 1),
        f"cc-{TRACE_ID}-{SPAN_ID}-01.more",
        f"cc-{TRACE_ID}-{SPAN_ID}-01-" + "x" * 300,
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
    ],
)
def test_invalid_header_is_ignored(text: str) -> None:
    assert read_traceparent(text) is None


def test_text_of_a_context_is_read_again() -> None:
    for sampled in (True, False):
        context = TraceContext(TRACE_ID, SPAN_ID, sampled)

        assert read_traceparent(str(context)) == context


def test_each_attempt_is_a_child_of_its_own() -> None:
    attempts = {
        attempt_traceparent(TEXT, JobId(job), LeaseNumber(lease))
        for job in ("job1", "job2")
        for lease in (1, 2)
    }

    assert len(attempts) == 4
    for each in attempts:
        context = read_traceparent(each)
        assert context is not None
        assert (context.trace_id, context.sampled) == (TRACE_ID, True)
        assert context.span_id != SPAN_ID
    assert attempt_traceparent("nonsense", JobId("job1"), LeaseNumber(1)) == ""
