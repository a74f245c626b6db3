"""What is known of tokens beyond their number, within bounds."""

from shoal.domain.credentials import REPORTED_TOKENS_MAX, reported_usage
from shoal.domain.outcome import Outcome, Usage


def test_details_are_kept_as_they_are_reported() -> None:
    usage = Usage(10, 5, cached_tokens=8, reasoning_tokens=3)

    assert reported_usage(Outcome("", usage=usage)) == usage


def test_what_is_not_reported_stays_unknown() -> None:
    assert Usage(10, 5).bounded(100) == Usage(10, 5, None, None)


def test_a_part_is_never_more_than_the_whole() -> None:
    reported = Usage(10, -5, cached_tokens=11, reasoning_tokens=-1)

    assert reported.bounded(9) == Usage(9, 0, cached_tokens=9, reasoning_tokens=0)


def test_a_sum_of_reported_counts_cannot_overflow() -> None:
    reported = Usage(2**70, 2**70, 2**70, 2**70)

    bounded = reported_usage(Outcome("", usage=reported))

    assert bounded == Usage(*4 * [REPORTED_TOKENS_MAX])
