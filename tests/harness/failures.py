"""The last thing that the suite prints: each failure in a few lines.

pytest's own summary has one line for each, cut to the width of the terminal, and says
neither where nor what was compared.  ``.ci/run`` prints this section once more at its
end, whatever ran after the tests: it finds it by its title.
"""

from collections.abc import Generator

import pytest

TITLE = "failures in short"
LINES_MAX = 6  # of a message
FAILURES_MAX = 50


class Failures:
    """The plugin of the process that prints."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None]:
        yield  # for everything else that is printed
        reports = [
            report
            for kind in ("failed", "error")
            for report in terminalreporter.getreports(kind)
        ]
        if not reports:
            return
        terminalreporter.section(TITLE)
        for report in reports[:FAILURES_MAX]:
            terminalreporter.write_line(in_short(report))
        if len(reports) > FAILURES_MAX:
            terminalreporter.write_line(f"and {len(reports) - FAILURES_MAX} more")


def in_short(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return which test failed, where, and the beginning of the message."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:  # a module that cannot be imported, or a process that died
        lines = str(report.longrepr).strip().splitlines()[-LINES_MAX:]
    else:
        first, *more = crash.message.splitlines() or [""]
        lines = [f"{crash.path}:{crash.lineno}: {first}", *more][:LINES_MAX]
    phase = "" if report.when in ("call", None) else f" ({report.when})"
    return "\n    ".join([f"FAILED {report.nodeid}{phase}", *lines])
