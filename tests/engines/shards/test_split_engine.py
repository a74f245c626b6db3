"""The engine of a split model: where its layers are, and the kinds of its work."""

import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.outputs import ask
from engines.shards.conftest import write_program
from harness.llama_cpp import llama_cpp, one_process
from shoal.domain.work import Embedding, Inference, Rerank
from shoal.engines.gguf_files import kinds_of
from shoal.engines.llama_child import MODEL, ModelToOpen
from shoal.engines.server_kinds import TEXT
from shoal.engines.shards.programs import find_programs
from shoal.engines.shards.shard_process import ShardProcess
from shoal.engines.shards.split_child import (
    SplitOptions,
    command_of,
    has_last_layers,
    placement,
)
from shoal.engines.shards.split_engine import SplitEngine
from shoal.worker.shard_links import ShardLinks
from worker.fake_shards import GROUP, PROTOCOL, RUNNER, open_port, shard_at


@pytest.mark.parametrize(
    ("device", "layers", "expected"),
    [
        # The first layers, and the output, are the processor's own.
        ("CPU", (18, 12), {"--gpu-layers": 19, "--tensor-split": "19"}),
        ("CPU", (7, 14, 9), {"--gpu-layers": 22, "--tensor-split": "7,15"}),
        ("CPU", (18, 0), {"--gpu-layers": 19, "--tensor-split": "19"}),
        # A GPU comes after the shards, with the output.
        ("CUDA0", (18, 12), {"--gpu-layers": 999, "--tensor-split": "18,13"}),
    ],
)
def test_output_stays_where_the_model_is_run(
    device: str, layers: tuple[int, ...], expected: Mapping[str, object]
) -> None:
    split = SplitOptions("llama-server", device, (1,) * (len(layers) - 1), layers, 512)

    options = dict(placement(split))

    kept = options.pop("--override-tensor", None)
    assert options == expected
    assert (kept is not None) == (device == "CPU")


def layers_of_devices(options: Mapping[str, object], count: int) -> Sequence[int]:
    """Return how many layers each device has, the processor first, as llama.cpp does.

    ``llama_model::load_tensors`` (src/llama-model.cpp): the last of ``--gpu-layers``,
    among which the output is one, go to the devices, by cumulated shares.
    """
    on_devices = min(int(str(options["--gpu-layers"])), count + 1)
    shares = [float(each) for each in str(options["--tensor-split"]).split(",")]
    bounds = [sum(shares[: end + 1]) / sum(shares) for end in range(len(shares))]
    first = count + 1 - on_devices
    found = [first] + [0] * len(shares)
    for layer in range(first, count):
        found[1 + bisect_right(bounds, (layer - first) / on_devices)] += 1
    return found


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(0, 60))
def test_each_machine_gets_the_layers_of_the_plan(lent: list[int], own: int) -> None:
    """In the order of the plan: a GPU of this machine after the others."""
    count, ports = sum(lent) + own, tuple(lent)
    for device in ("CPU", "CUDA0"):
        split = SplitOptions("llama-server", device, ports, (*lent, own), 512)

        found = layers_of_devices(placement(split), count)

        last = has_last_layers(device)
        assert found == ([0, *lent, own] if last else [own, *lent])


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_server_gets_the_options_that_it_knows(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    write_program(program, 'test "$1" = --help && echo "--no-slots  --cache-ram N"')
    split = SplitOptions(str(program), "CPU", (81, 82), (1, 1, 1), 64)
    model = ModelToOpen("m.gguf", "p.gguf", 2, 100, 3, 8)

    command = command_of(split, model, TEXT)

    said = " ".join(command)
    assert "--rpc 127.0.0.1:81,127.0.0.1:82" in said
    assert "--ctx-size 200" in said
    assert "--batch-size 64" in said
    assert "--mmproj p.gguf" in said
    assert said.endswith("--no-slots --cache-ram 0")
    assert "--fit" not in said


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Debian's programs run there")
@pytest.mark.parametrize(
    ("kind", "work", "options"),
    [
        ("vectors", Embedding(MODEL, ("one text", "another")), ["--embeddings"]),
        (
            "ranks",
            Rerank(MODEL, "a question", ("one text", "another")),
            ["--embeddings", "--reranking", "--pooling", "rank"],
        ),
    ],
)
async def test_split_model_does_the_work_of_its_kind(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    work: Inference,
    options: Sequence[str],
) -> None:
    path: Path = request.getfixturevalue(kind)
    programs = await find_programs(llama_cpp())
    assert programs is not None
    async with one_process(programs, path, 1024, *options) as whole:
        expected = await ask(whole, work)
    port = await open_port(await ShardProcess.start(programs, tmp_path / "lent"))
    links = await ShardLinks.open(GROUP, RUNNER, PROTOCOL, [shard_at(port)])
    engine = SplitEngine(
        *(MODEL, path),
        programs=programs,
        layers=(1, 1),
        links=links,
        kinds=kinds_of(path),
    )
    await engine.start()

    found = await ask(engine, work)

    assert found.choices
    assert found.choices == expected.choices
    await engine.close()
    await port.close()
