"""Training runs on the page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from browser.chromium import visitor
from live.programs import KEY, PATIENCE, Pool, Programs, eventually

SCRIPT = """
import os, sys, time
for step in range(1, 31):
    print(f"step={step} loss={3 / step}", flush=True)
    time.sleep(0.02)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Pool]:
    running = Programs(tmp_path)
    try:
        pool = running.serve()
        for name in ("beagle", "collie"):
            pool.join(name, "--trust-code", "--slots", "1")
        eventually(lambda: len(pool.workers()) == 2, "two workers")
        yield pool
    finally:
        running.close()


def test_run_is_followed_to_its_end(
    trainers: Pool, engine: Browser, tmp_path: Path
) -> None:
    script, go_on = tmp_path / "train.py", tmp_path / "go"
    script.write_text(SCRIPT)
    run = submitted(trainers, "--nodes", "2", str(script), str(go_on))
    with visitor(engine, trainers.url) as visiting:
        visiting.sign_in(KEY)
        visiting.go("#/runs")
        page = visiting.page
        page.get_by_role("button", name=f"Run {run}").click()

        # How many points depends on how fast the script is: reports are bundled.
        loss = re.compile(r"^Loss over \d+ points, from \S+ to 0\.10000$")
        plot = page.get_by_role("img", name=loss)
        expect(plot.locator("canvas")).to_be_visible()
        rows = page.get_by_role("region", name="Ranks").locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.filter(has_text="running")).to_have_count(2)
        assert visiting.barriers() == []
        visiting.save("run")
        go_on.touch()

        expect(page.locator(".sum .badge")).to_have_text("done")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


def submitted(pool: Pool, *words: str) -> str:
    """Submit a run; return its id."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "train", "--detach", *words],
        env={**os.environ, "SHOAL_URL": pool.url, "SHOAL_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
