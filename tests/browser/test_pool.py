"""The picture of the pool while machines work."""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, expect

from browser.chromium import visitor
from live.programs import (
    KEY,
    PATIENCE,
    GatedModel,
    Pool,
    Programs,
    answer_to,
    eventually,
    text_in,
)

ASK = "What makes the tides?"
WORDS = ["word "] * 20_000  # more than are written while one looks
MACHINES = {  # their models, seconds between words, and the chats that each gets
    "beagle": (("qwen3-32b", "gemma-3-12b"), 0.02, ("qwen3-32b", "gemma-3-12b")),
    "collie": (("qwen3-8b",), 0.03, ("qwen3-8b",) * 2),
    "poodle": (("llama-3.2-3b",), 0.05, ("llama-3.2-3b",)),
}
SAMPLES = 10  # of a second each, for lines that show something
DRAWN = """(samples) =>
  document.querySelector(".numbers .spark polyline").points.length >= samples"""


@pytest.fixture
def working(programs: Programs) -> Iterator[Pool]:
    """A pool of three machines that write answers."""
    pool = programs.serve()
    with ExitStack() as stack:
        client = stack.enter_context(pool.client())
        for machine, (names, pace, chats) in MACHINES.items():
            model = GatedModel(len(WORDS), {ASK: WORDS}, pace=pace, names=names)
            stack.callback(model.close)
            pool.joined(machine, *model.flags)
            for name in chats:
                chunks = stack.enter_context(answer_to(client, ASK, name))
                next(text_in(chunks))
        yield pool


def test_open_jobs_of_hours_before_the_page_are_shown(
    engine: Browser, programs: Programs
) -> None:
    pool = programs.serve()
    first = int(time.time() // 60 - 179) * 60
    opened = {"jobs": 0, "tokens": 0, "running": 7, "queued": 30}
    minutes = [{"at": first + 60 * n} | opened for n in range(180)]
    with visitor(engine, pool.url) as visiting:
        page = visiting.page
        page.route(
            "**/admin/usage/minutes*",
            lambda route: route.fulfill(json={"data": minutes}),
        )
        visiting.sign_in(KEY)
        plot = page.get_by_label("Jobs running and queued in the last 3 hours")

        def under_the_pointer() -> list[str]:
            # Again each time: what is above may move the plot away from the pointer.
            plot.locator(".u-over").hover()
            return plot.locator(".u-value").all_inner_texts()[1:]

        eventually(lambda: under_the_pointer() == ["7", "30"], "both lines' values")


def test_pool_at_work_is_shown(engine: Browser, working: Pool) -> None:
    with visitor(engine, working.url, color_scheme="light") as visiting:
        visiting.sign_in(KEY)
        page = visiting.page
        picture = page.get_by_role("region", name="The machines of the pool")

        for machine in MACHINES:
            tile = picture.locator("article", has_text=machine)
            expect(tile.locator(".tile-rate")).not_to_have_text("0 tok/s")
            expect(tile.get_by_text("runs")).to_be_visible()
            expect(tile.get_by_text("encrypted")).to_be_visible()
        expect(picture.locator("[data-hub]")).to_contain_text("5 jobs running")
        rate = picture.locator("[data-hub] b")
        expect(rate).to_have_text(re.compile(r"^[1-9]"))
        page.wait_for_function(DRAWN, arg=SAMPLES, timeout=1000 * PATIENCE)
        visiting.save("pool")
