"""A program that lends one shard: prints it as JSON, and runs until it is ended."""

import asyncio
import sys
from pathlib import Path

import msgspec

from harness.llama_cpp import llama_cpp
from shoal.engines.shards.programs import find_programs
from shoal.engines.shards.shard_process import ShardProcess
from shoal.worker.shard_port import ShardPort
from worker.fake_shards import GROUP, RUNNER, shard_at


async def main() -> None:
    programs = await find_programs(llama_cpp())
    assert programs is not None
    process = await ShardProcess.start(programs, Path(sys.argv[1]), threads=1)
    port = await ShardPort.open("127.0.0.1", GROUP, RUNNER.public_key.hex(), process)
    print(msgspec.json.encode(shard_at(port)).decode(), process.pid, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
