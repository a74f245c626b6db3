"""Counts primes on every machine of a pool.

shoal serve
shoal join --tasks examples/count_primes.py
python examples/count_primes.py
"""

import shoal

SPAN = 50_000


@shoal.task
def primes_from(start: int, span: int) -> int:
    """Return how many primes there are from ``start`` on, before ``start + span``."""
    return sum(is_prime(number) for number in range(start, start + span))


def is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def main(end: int = 1_000_000) -> int:
    """Return how many primes there are below ``end``, a multiple of ``SPAN``."""
    with shoal.Pool() as pool:
        starts = range(0, end, SPAN)
        spans = [SPAN] * len(starts)
        return sum(pool.map(primes_from, starts, spans, ordered=False))


if __name__ == "__main__":
    print(main())
