"""``shoal.launch``: what it refuses before anything is sent."""

from typing import Any

import pytest

import shoal
from shoal.domain.errors import InvalidRequest


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nodes": 0}, "nodes=0: expected 1 to 256"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes=3: expected 1 to 2"),
        ({"nodes": 2, "min_nodes": 0}, "min_nodes=0: expected 1 to 2"),
        ({"nodes": 1, "processes": 65}, "processes=65: expected 1 to 64"),
        ({"nodes": 1, "backend": "mpi"}, "backend=mpi: expected one of shoal, gloo"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        shoal.launch("train.py", **arguments)
