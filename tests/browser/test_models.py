"""The models of a pool in a browser: loading one on a machine, and undoing it."""

from playwright.sync_api import Browser, expect

from browser.chromium import visitor
from live.programs import KEY, Programs
from live.test_models_on_demand import machine


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
