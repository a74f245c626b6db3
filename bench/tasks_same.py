"""The function that Shoal's worker runs for bench/tasks.py."""

import shoal


@shoal.task(name="bench.same")
def same(x: int) -> int:
    return x
