"""Estimates the size of a model by its name.

Names tell the number of parameters (``qwen3-8b``, ``mixtral-8x7b``), and some of them
the quantization.  Source of the bits: what ``llama-quantize --help`` of llama.cpp says
of models of 8 billion parameters.
"""

import re

BITS = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8": 8.5,
    "Q6": 6.6,
    "Q5": 5.7,
    "Q4": 4.9,
    "IQ4": 4.5,
    "MXFP4": 4.3,
    "Q3": 3.9,
    "IQ3": 3.5,
    "Q2": 3.0,
    "IQ2": 2.6,
}
"""Bits for a weight, by the beginning of a quantization's name."""

USUAL = 4.9  # bits: of four bits, which ``shoal models pull`` chooses
PARAMETERS_MAX = 10_000e9
NAME_MAX = 512  # characters that are read

_PARAMETERS = re.compile(
    r"(?<![0-9a-z.])(?:([0-9]{1,3})x)?([0-9]{1,4}(?:\.[0-9]{1,3})?)([bm])(?![0-9a-z])",
    re.IGNORECASE,
)
_QUANTIZATION = re.compile(
    r"(?<![0-9a-z])(MXFP4|BF16|F16|FP16|F32|IQ[234]|Q[234568])(?![0-9])", re.IGNORECASE
)


def estimated_size(name: str) -> int | None:
    """Return the approximate bytes of a model; None if its name does not tell."""
    name = name[:NAME_MAX]
    if (found := _PARAMETERS.search(name)) is None:
        return None
    experts, number, unit = found.groups()
    parameters = float(number) * (1e9 if unit in "bB" else 1e6) * int(experts or 1)
    if not 0 < parameters <= PARAMETERS_MAX:
        return None
    return int(parameters * _bits(name) / 8)


def _bits(name: str) -> float:
    found = _QUANTIZATION.search(name)
    if found is None:
        return USUAL
    return BITS.get(found[1].upper().replace("FP16", "F16"), USUAL)
