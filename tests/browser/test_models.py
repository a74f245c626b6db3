"""The models of a pool in a browser: loading one on a machine, and undoing it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from playwright.sync_api import Browser, expect

from browser.chromium import visitor
from live.programs import KEY, TINY, Programs
from live.test_models_on_demand import machine, said
from models.hub_server import HubServer, serving


def test_a_model_is_loaded_on_a_machine_and_let_go(
    engine: Browser, programs: Programs
) -> None:
    pool = programs.serve()
    machine(programs, pool, "anna", "small")
    machine(programs, pool, "ben", "small")
    with visitor(engine, pool.url) as visiting:
        visiting.sign_in(KEY)
        page = visiting.page
        page.goto(f"{pool.url}/#/models")
        card = page.locator("article", has_text="small")
        expect(card).to_contain_text("Not loaded: the first request has it loaded")
        card.get_by_role("button", name="small").click()
        dialog = page.get_by_role("dialog")

        dialog.get_by_role("button", name="Load on ben").click()

        loaded = dialog.get_by_role("listitem").filter(has_text="loaded")
        expect(loaded).to_have_count(1)
        expect(loaded).to_contain_text("ben")
        expect(dialog.get_by_role("button", name="Load on anna")).to_be_visible()
        visiting.save("models-on-demand")

        dialog.get_by_role("button", name="Undo").click()

        expect(dialog.get_by_role("button", name="Undo")).to_have_count(0)
        assert pool.admin("deployments")["data"] == []


@contextmanager
def hub_of(files: dict[str, bytes]) -> Iterator[HubServer]:
    """Serve the repository org/Tiny-GGUF in a thread."""
    hub, loop = HubServer({"org/Tiny-GGUF": files}), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with ExitStack() as stack:
            served = serving(hub)
            asyncio.run_coroutine_threadsafe(served.__aenter__(), loop).result()
            end = served.__aexit__(None, None, None)
            stack.callback(lambda: asyncio.run_coroutine_threadsafe(end, loop).result())
            yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_model_of_the_hub_is_loaded_and_copied_to_a_second_machine(
    engine: Browser, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of({"tiny-Q8_0.gguf": TINY.read_bytes()}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(programs.folder / "cache"))
        pool = programs.serve()
        for name in ("anna", "ben"):
            data = str(programs.folder / name)
            pool.joined(name, "--load", "pull", "--data-dir", data)
        with visitor(engine, pool.url) as visiting:
            visiting.sign_in(KEY)
            page = visiting.page
            page.goto(f"{pool.url}/#/models")
            page.get_by_role("button", name="From the hub").click()
            form = page.get_by_role("dialog")
            form.get_by_label("Repository").fill("org/Nothing-GGUF")
            form.get_by_role("button", name="Load").click()
            expect(form.get_by_role("alert")).to_contain_text("org/Nothing-GGUF")
            visiting.faults.clear()  # how browsers log an answer of 400

            form.get_by_label("Repository").fill("org/Tiny-GGUF:Q8_0")
            form.get_by_label("Machine").select_option(label="anna")
            visiting.save("models-hub")
            form.get_by_role("button", name="Load").click()

            dialog = page.get_by_role("dialog", name="tiny")
            loaded = dialog.get_by_role("listitem").filter(has_text="loaded")
            expect(loaded).to_have_count(1)
            expect(loaded).to_contain_text("anna")
            assert said(pool, "tiny")

            copies = dialog.get_by_role("listitem").filter(has_text="copies it first")
            expect(copies).to_contain_text("ben")
            copies.get_by_role("button", name="Load on ben").click()

            expect(loaded).to_have_count(2)
