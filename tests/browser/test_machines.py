"""Machines on the page: how they join, are approved, paused and drained."""

import re

from playwright.sync_api import Browser, Route, expect

from browser.chromium import Visitor, visitor
from live.programs import Pool, Programs, eventually


def test_join_panel_has_the_command_and_its_code(admin: Visitor, pool: Pool) -> None:
    admin.page.get_by_role("link", name="Add a machine").click()
    panel = admin.page.get_by_role("dialog", name="Add a machine")

    expect(panel.get_by_text(pool.ready["join"])).to_be_visible()
    code = panel.get_by_role("img", name="QR code of the join command")
    expect(code).to_have_js_property("complete", True)
    assert code.evaluate("image => image.naturalWidth > 100")
    panel.get_by_role("button", name="Copy").click()
    read = "navigator.clipboard.readText()"
    eventually(lambda: admin.page.evaluate(read) == pool.ready["join"], "it is copied")
    admin.save("join")
    admin.page.keyboard.press("Escape")
    expect(panel).to_have_count(0)


def test_machine_is_paused_and_resumed(admin: Visitor, pool: Pool) -> None:
    admin.go("#/nodes")
    page = admin.page
    page.get_by_role("button", name="collie", exact=True).click()
    machine = page.get_by_role("dialog", name="collie")

    machine.get_by_role("button", name="Pause collie").click()
    expect(machine.get_by_text("paused", exact=True)).to_be_visible()
    machine.get_by_role("button", name="Resume collie").click()
    expect(machine.get_by_text("active", exact=True)).to_be_visible()

    assert [each["suspension"] for each in pool.workers()] == [None, None]


def test_address_of_a_machine_that_left_says_so(admin: Visitor) -> None:
    admin.go("#/nodes/tealenet:poodle")

    expect(admin.page.get_by_text("tealenet:poodle is not in the pool")).to_be_visible()
    admin.page.get_by_role("link", name="Its events").click()
    expect(admin.page.get_by_role("heading", name="Events")).to_be_visible()


def test_filter_and_dialog_stay_out_of_the_way(admin: Visitor) -> None:
    admin.go("#/nodes")
    page = admin.page
    page.get_by_label("State", exact=True).select_option("active")
    page.get_by_role("button", name="collie", exact=True).click()
    machine = page.get_by_role("dialog", name="collie")
    expect(machine).to_be_visible()
    page.keyboard.press("Escape")
    expect(machine).to_have_count(0)
    expect(page.get_by_label("State", exact=True)).to_have_value("active")

    page.get_by_role("button", name="collie", exact=True).click()
    machine.get_by_role("link", name="Its events").click()
    expect(page.get_by_role("heading", name="Events")).to_be_visible()
    page.evaluate("new Promise((done) => setTimeout(done))")  # events that were queued
    assert "#/events" in page.url


def test_closed_dialog_leaves_another_view_alone(admin: Visitor) -> None:
    admin.go("#/nodes?join")
    page = admin.page
    expect(page.get_by_role("dialog", name="Add a machine")).to_be_visible()

    # The dialog's own event comes after both.
    page.evaluate("document.querySelector('dialog').close(); location.hash = '#/keys'")

    expect(page.get_by_role("heading", name="Keys", level=1)).to_be_visible()
    assert "#/keys" in page.url


def test_join_panel_gives_way_to_a_machine(admin: Visitor) -> None:
    admin.go("#/nodes")
    page = admin.page
    page.get_by_role("button", name="Add a machine").click()
    panel = page.get_by_role("dialog", name="Add a machine")
    expect(panel).to_be_visible()

    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Go to").fill("collie")
    page.keyboard.press("Enter")

    expect(page.get_by_role("dialog", name="collie")).to_be_visible()
    expect(panel).to_have_count(0)
    page.go_back()
    expect(panel).to_be_visible()


def test_failed_order_is_told_to_who_left_its_dialog(admin: Visitor) -> None:
    admin.go("#/nodes")
    page = admin.page
    asked: list[Route] = []
    page.route("**/admin/workers/*/drain", lambda route: asked.append(route))
    page.get_by_role("button", name="collie", exact=True).click()
    page.get_by_role("button", name="Drain collie").click()
    dialog = page.get_by_role("dialog", name="Drain collie?")
    with page.expect_request("**/admin/workers/*/drain"):
        dialog.get_by_role("button", name="Drain", exact=True).click()

    page.evaluate("location.hash = '#/jobs'")
    expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_visible()
    asked[0].fulfill(status=409, json={"error": {"message": "it \u202eleaves already"}})

    admin.wait_for_toast(r"it \u202eleaves already")
    admin.faults.clear()  # how browsers log an answer of 409


def test_token_ends_in_the_future(admin: Visitor) -> None:
    admin.go("#/nodes?join")
    page = admin.page
    page.get_by_text("A separate token").click()
    page.get_by_label("Name").fill("office")
    page.get_by_label("Expires").select_option("in 1 day")
    page.get_by_role("button", name="Create the token").click()
    expect(page.get_by_text("is shown only once")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)

    admin.go("#/keys")
    expect(page.get_by_role("row", name="office")).to_contain_text(
        re.compile("in (23 h|1 d)")
    )


def test_drained_machine_is_resumed_and_a_removed_one_leaves(
    engine: Browser, programs: Programs
) -> None:
    pool = programs.serve()
    worker = pool.joined("beagle")

    with visitor(engine, pool.url) as admin:
        admin.follow(pool.ready["dashboard"])
        admin.go("#/nodes")
        page = admin.page
        page.get_by_role("button", name="beagle", exact=True).click()
        page.get_by_role("button", name="Drain beagle").click()
        asked = page.get_by_role("dialog", name="Drain beagle?")
        asked.get_by_role("button", name="Drain", exact=True).click()

        expect(page.locator("td").get_by_text("drained", exact=True)).to_be_visible()
        admin.save("drained")
        resuming = page.get_by_role("button", name="Resume beagle")
        expect(resuming).to_be_visible()
        removing = page.get_by_role("button", name="Remove beagle")
        button = removing.element_handle()
        resuming.click()
        expect(page.locator("td").get_by_text("active", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Pause beagle")).to_be_visible()
        # It is the same for who presses it while other orders come and go.
        assert button.get_attribute("aria-label") == "Remove beagle"

        removing.click()
        asked = page.get_by_role("dialog", name="Remove beagle?")
        asked.get_by_role("button", name="Remove", exact=True).click()
        expect(page.get_by_role("button", name="Remove beagle")).to_have_count(0)
        assert worker.wait() == 1  # not 0: a service starts it again
        page.get_by_role("button", name="Resume beagle").click()
        admin.wait_for_toast("start it again there")

        pool.joined("beagle")
        expect(page.locator("td").get_by_text("active", exact=True)).to_be_visible()


def test_new_machine_waits_for_approval(engine: Browser, programs: Programs) -> None:
    pool = programs.serve("--approve-nodes")
    pool.joined("beagle")

    with visitor(engine, pool.url) as admin:
        admin.follow(pool.ready["dashboard"])
        page = admin.page
        expect(
            page.get_by_text("beagle is waiting for approval", exact=True)
        ).to_be_visible()
        page.get_by_role("link", name="Review").click()
        page.get_by_role("button", name="Approve beagle").first.click()

        expect(page.get_by_role("button", name="Approve beagle")).to_have_count(0)
        states = [each["suspension"] for each in pool.workers()]
        assert states == [None] * len(states)


def test_coordinator_that_is_away_is_told_and_comes_back(
    engine: Browser, programs: Programs
) -> None:
    first = programs.serve()
    with visitor(engine, first.url) as admin:
        admin.follow(first.ready["dashboard"])
        expect(admin.page.get_by_text("Live", exact=True)).to_be_visible()

        first.program.kill()
        expect(
            admin.page.get_by_text("The coordinator does not answer", exact=True)
        ).to_be_visible()
        admin.save("away")
        # In vain yet: with a coordinator, the page may be faster than its reader.
        admin.page.get_by_role("button", name="Try now").click()
        second = programs.serve(port=first.port)
        expect(admin.page.get_by_text("Live", exact=True)).to_be_visible()
        second.joined("beagle")
        expect(admin.page.get_by_role("button", name="beagle")).to_be_visible()
        admin.faults.clear()  # connections that were refused meanwhile
