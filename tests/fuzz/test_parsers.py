"""Whatever bytes come, a parser takes them or says what is wrong with them."""

from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutations import mutated
from fuzz.parsers import PARSERS
from shoal.domain.errors import PeerError

every_parser = pytest.mark.parametrize("name", PARSERS)


@every_parser
def test_what_was_recorded_is_taken_or_refused(name: str) -> None:
    for data in PARSERS[name].seeds():
        with suppress(PeerError):
            PARSERS[name].parse(data)


@every_parser
@given(data=st.binary(max_size=300))
def test_no_bytes_break_a_parser(name: str, data: bytes) -> None:
    with suppress(PeerError):
        PARSERS[name].parse(data)


@every_parser
@given(seed=st.integers(0, 2**32))
def test_nothing_like_what_was_recorded_breaks_a_parser(name: str, seed: int) -> None:
    data = mutated(Random(seed), PARSERS[name].seeds())

    with suppress(PeerError):
        PARSERS[name].parse(data)
