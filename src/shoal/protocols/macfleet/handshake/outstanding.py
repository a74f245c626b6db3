"""The challenges that a node has put to others lately, on all its connections.

Whoever hands one of them back wants us to answer it for him.
"""

from collections import OrderedDict

REMEMBERED_FOR = 30.0  # seconds; for an answer that comes later nobody waits
REMEMBERED_MAX = 16_384  # challenges; the one that was put longest ago goes first


class Outstanding:
    """Challenges by what they are.  Times are monotonic seconds.

    When it is full the oldest goes, and nobody is kept out: by ``challenges.MARK`` each
    of them is known besides.
    """

    def __init__(self) -> None:
        self._put: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, challenge: bytes) -> bool:
        """Whether it is one of ours."""
        return challenge in self._put

    def put(self, challenge: bytes, now: float) -> None:
        """Note a challenge of ours, and forget those that nobody answers any more."""
        while self._put:
            oldest, at = next(iter(self._put.items()))
            if now < at + REMEMBERED_FOR and len(self._put) < REMEMBERED_MAX:
                break
            del self._put[oldest]
        self._put[challenge] = now
