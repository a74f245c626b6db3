import platform

import psutil
import pytest

from shoal.app.background import trim_memory

BLOCK = 64 << 10  # bytes: too small for a mapping of its own
BLOCKS = 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps it")
def test_memory_that_was_freed_is_returned() -> None:
    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    blocks = [bytearray(BLOCK) for _ in range(BLOCKS)]
    kept = blocks[::64]  # so that the heap cannot end before them
    full = resident()
    del blocks

    trim_memory()

    assert resident() < full - BLOCK * BLOCKS // 2
    assert len(kept) == BLOCKS // 64
