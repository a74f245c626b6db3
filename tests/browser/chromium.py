"""Debian's Chromium under Playwright, and what a page must never do.

The build without a window, where there is one: a new profile costs it a third of the
processor time.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)

from harness.speed import PATIENCE

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
AXE = ROOT / ".venv-clients" / "node_modules" / "axe-core" / "axe.min.js"
"""Where `make test-long` installs axe-core."""
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")  # of the program
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
SIGNED_OUT = "/dashboard/session"  # which answers 401 to those who are signed out
SERIOUS = ("serious", "critical")
KEEP_TOASTS = """
  window.toasts = [];
  new MutationObserver((changes) => changes.forEach((change) => {
    for (const each of change.addedNodes) {
      if (each.classList?.contains("toast")) toasts.push(each.textContent);
    }
  })).observe(document, { childList: true, subtree: true });
"""  # they are shown for a few seconds, in which a busy machine may not look

expect.set_options(timeout=1000 * PATIENCE)


def chromium() -> str:
    """Return the path of the browser; `make test-long` installs it."""
    named = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES)]
    found = next(filter(None, named), None)
    assert found, f"there is no Chromium: apt-get install {NAMES[0]}"
    return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser without a window."""
    with sync_playwright() as playwright:
        # As root, as in containers, Chromium does not start with its sandbox.
        running = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox"]
        )
        yield running
        running.close()


class Visitor:
    """Somebody with a browser at a coordinator's dashboard.

    ``faults`` are the errors on the console and in scripts, among them violations of
    the Content-Security-Policy.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.faults: list[str] = []
        self.context = context
        self.page = self.open_page()

    def open_page(self) -> Page:
        """Open a tab."""
        page = self.context.new_page()
        page.add_init_script(KEEP_TOASTS)
        page.on("console", self._read)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        return page

    def go(self, fragment: str = "") -> None:
        """Open a view, such as ``#/nodes``, and wait until it replaces another."""
        self.page.goto(f"{self.url}/{fragment}")
        if view := re.match(r"#/(\w+)", fragment):
            expect(self.page).to_have_title(f"{view[1].capitalize()} · Shoal")

    def sign_in(self, key: str) -> None:
        """Sign in with an API key, at the first page."""
        self.go()
        self.page.get_by_label("API key", exact=True).fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.locator("main#main").wait_for()

    def follow(self, link: str) -> None:
        """Sign in with a one-time link."""
        self.page.goto(link)
        self.page.locator("main#main").wait_for()

    def save(self, name: str) -> None:
        """Save a picture of what is in sight in ``build/screenshots``."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")

    def wait_for_toast(self, text: str) -> None:
        """Wait until a message with a text was shown at the edge of the page."""
        self.page.wait_for_function(
            "(text) => toasts.some((each) => each.includes(text))", arg=text
        )

    def barriers(self) -> list[str]:
        """Return what axe-core finds serious about the page as it is."""
        if not self.page.evaluate("'axe' in window"):
            # Not a script of the page: CSP permits it.
            self.page.evaluate(AXE.read_text())
        found: list[dict[str, Any]] = self.page.evaluate(
            "async () => (await axe.run()).violations"
        )
        return [
            f"{each['id']}: {each['help']}: {node['target']} {node['html'][:200]}"
            for each in found
            if each["impact"] in SERIOUS
            for node in each["nodes"]
        ]

    def _read(self, message: ConsoleMessage) -> None:
        if message.type not in ("error", "warning"):
            return
        if message.location.get("url", "").endswith(SIGNED_OUT):
            return  # how browsers log an answer of 401
        self.faults.append(f"{message.text} ({message.location.get('url')})")


@contextmanager
def visitor(
    browser: Browser, url: str, size: str = "desktop", **options: Any
) -> Iterator[Visitor]:
    """Visit a dashboard in a new profile; fail if the page does what it must not."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, **options
    )
    context.set_default_timeout(1000 * PATIENCE)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    visiting = Visitor(context, url)
    try:
        yield visiting
    finally:
        context.close()
    if visiting.faults:
        raise AssertionError("\n".join(visiting.faults))
