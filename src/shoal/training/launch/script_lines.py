"""The output of a script: lines for people, and the numbers in them."""

import json
import math
import os
import re
import sys
from collections.abc import Mapping

from shoal.training.launch.script import RUN
from shoal.training.run_events import LINE_MAX, VALUES_MAX

REPORT = "\x1eshoal-report "
"""The beginning of a line that ``report`` prints; it is not shown."""

HASH = "\x1eshoal-hash "
"""The beginning of a line with a step and the hash of the parameters after it."""

BAR_END = "\r"
_LINE_END = re.compile(rb"(\r?\n|\r(?=[^\r\n]))")
_MEASURE = re.compile(r"\b(?:step|loss)=")
_STEP_AND_HASH = re.compile(HASH + r"(\d{1,15}) ([0-9a-f]{64})", re.ASCII)
_PAIR = re.compile(
    r"\b([A-Za-z_][\w/]{0,40})=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\b"
)


def report(**values: float) -> None:
    """Report numbers of this rank, for those who watch the run.

    ``step``, ``loss``, ``samples_per_s``, ``sync`` (the share of time in which ranks
    wait for each other, from 0 to 1) and ``generation`` have columns of their own.
    Outside a run, this does nothing.

        shoal.report(step=step, loss=loss.item(), samples_per_s=speed)
    """
    if RUN in os.environ:
        numbers = {name: float(value) for name, value in values.items()}
        sys.stdout.write(f"{REPORT}{json.dumps(numbers)}\n")
        sys.stdout.flush()


def report_hash(step: int, digest: bytes) -> None:
    """Report the SHA-256 of this rank's parameters after a step, as ``report`` does."""
    if RUN in os.environ:
        sys.stdout.write(f"{HASH}{step} {digest.hex()}\n")
        sys.stdout.flush()


def hash_in(line: str) -> tuple[int, str] | None:
    """Return the step and the hash that a line reports, if it does."""
    found = _STEP_AND_HASH.fullmatch(line)
    return None if found is None else (int(found[1]), found[2])


class OutputLines:
    """Splits what a script prints into lines, and bars, which end with ``\\r``.

    A bar is the text before or after a carriage return; it may be returned again.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._moves = False  # whether the rest replaces a text before it

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the complete lines, and how far the bars are."""
        parts = _LINE_END.split(self._rest + data)
        found, self._rest = [*zip(parts[:-1:2], parts[1::2], strict=True)], parts[-1]
        while len(self._rest) > LINE_MAX:
            found.append((self._rest[:LINE_MAX], b"\n"))
            self._rest = self._rest[LINE_MAX:]
        if found:
            self._moves = found[-1][1] == b"\r"
        if self._moves or self._rest.endswith(b"\r"):
            found.append((self._rest.rstrip(b"\r"), b"\r"))
        return [_decoded(text, end) for text, end in found if text or end != b"\r"]

    def end(self) -> list[str]:
        """Return what is left at the end."""
        rest = self._rest.rstrip(b"\r")
        return [_decoded(rest, b"\n")] if rest else []


def _decoded(line: bytes, end: bytes) -> str:
    text = line[:LINE_MAX].decode(errors="replace")
    return text + BAR_END if end == b"\r" else text


def values_in(line: str) -> tuple[Mapping[str, float], bool]:
    """Return the numbers that a line reports, and whether it is for people as well.

    Lines with ``step=12`` or ``loss=3.4`` are reports: all their numbers count.
    """
    if line.startswith(REPORT):
        try:
            parsed = json.loads(line[len(REPORT) :])
        except ValueError:
            return {}, True
        return _usable(parsed if isinstance(parsed, dict) else {}), False
    if _MEASURE.search(line[:LINE_MAX]) is None:
        return {}, True
    pairs = _PAIR.findall(line[:LINE_MAX])
    return _usable({name: float(value) for name, value in pairs}), True


def _usable(values: Mapping[str, object]) -> Mapping[str, float]:
    """Return what are finite numbers: JSON has no others."""
    found = {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
    return dict(list(found.items())[:VALUES_MAX])
