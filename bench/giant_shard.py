"""A machine of bench/giant.py that lends a shard: PROGRAMS FOLDER GROUP KEY [CACHE].

Its first line is where that is reached.
"""

import asyncio
import json
import sys
from pathlib import Path

from load import run
from shoal.engines.shards.programs import find_programs
from shoal.engines.shards.shard_process import ShardProcess
from shoal.worker.shard_port import ShardPort


async def main() -> None:
    programs, folder, group, key, *cache = sys.argv[1:]
    found = await find_programs(Path(programs))
    assert found is not None
    process = await ShardProcess.start(
        found, Path(folder), cache=Path(cache[0]) if cache else None, threads=1
    )
    port = await ShardPort.open("127.0.0.1", group, key, process)
    print(
        json.dumps({"port": port.port, "fingerprint": port.fingerprint}),
        flush=True,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
