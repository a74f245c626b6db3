"""The text of metrics, which is made in pieces."""

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from shoal.domain.histogram import observe
from shoal.gateway.metrics.families import (
    LINES_MAX,
    PIECE,
    HistogramFamily,
    counters,
    exposition,
)

MODELS = [f"model-{number}" for number in range(5 * PIECE)]


class Collected(Collector):
    """A large family of each kind."""

    def __init__(self) -> None:
        self.seconds = HistogramFamily("seconds", "Time", ("model",), (0.1, 1.0))
        for model in MODELS:
            observe((self.seconds.of[(model,)], 0.5))

    def collect(self) -> Iterator[Metric]:
        found: Mapping[tuple[str, ...], float] = {(model,): 7.0 for model in MODELS}
        yield counters("ends", "Ends", ("model",), found)
        yield from self.seconds.collect()
        many: Mapping[tuple[str, ...], float] = {
            (f"{number}",): 1.0 for number in range(5 * LINES_MAX)
        }
        yield counters("tokens", "Tokens", ("model",), many)


class Whole(Collector):
    """The same families, each as one metric."""

    def __init__(self, collected: Collected) -> None:
        self._collected = collected

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._collected.collect():
            if metric.name in families:
                families[metric.name].samples.extend(metric.samples)
            else:
                families[metric.name] = Metric(
                    metric.name, metric.documentation, metric.type
                )
                families[metric.name].samples = [*metric.samples]
        yield from families.values()


async def test_text_in_pieces_is_that_of_the_library() -> None:
    collected = Collected()
    registry = CollectorRegistry()
    registry.register(Whole(collected))

    assert await exposition(collected.collect()) == generate_latest(registry)
    # Also when a part of it was kept.
    observe((collected.seconds.of[(MODELS[0],)], 0.7))
    observe((collected.seconds.of[("new",)], 0.7))
    assert await exposition(collected.collect()) == generate_latest(registry)


async def test_other_tasks_run_while_a_long_text_is_made() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    text = await exposition(Collected().collect())
    counting.cancel()

    assert turns >= text.count(b"\n") / LINES_MAX


async def test_histograms_that_are_counted_meanwhile_do_not_end_a_scrape() -> None:
    collected = Collected()
    metrics = collected.collect()
    scrape = asyncio.create_task(exposition(metrics))
    number = 0
    while not scrape.done():
        number += 1
        observe((collected.seconds.of[(f"new-{number}",)], 0.5))
        await asyncio.sleep(0)

    assert b'model="model-99"' in await scrape


def test_only_pieces_with_new_values_are_made_again() -> None:
    family = Collected().seconds
    before = [*family.collect()]

    assert all(a is b for a, b in zip(before, family.collect(), strict=True))

    observe((family.of[(MODELS[PIECE],)], 0.5))
    same = [a is b for a, b in zip(before, family.collect(), strict=True)]
    assert same == [True, False, True, True, True]
