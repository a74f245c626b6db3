"""The page for everybody: keyboards, screen readers, small screens, dark and light."""

import json
from datetime import datetime
from importlib.resources import files

import pytest
from playwright.sync_api import Browser, Route, expect

from browser.chromium import SIZES, Visitor, visitor
from live.programs import KEY, Pool

VIEWS = sorted(
    each.name.removesuffix(".js")
    for each in (files("shoal") / "dashboard_files" / "views").iterdir()
)


CUT_OFF = """[...document.querySelectorAll(".table-box:not(.scroll) > table")]
  .filter((table) => table.offsetWidth > table.parentElement.clientWidth)
  .map((table) => table.caption.textContent)"""


COUNT_FRAMES = """
window.moved = 0; // pictures of an animation
let animates = false;
const request = window.requestAnimationFrame;
window.requestAnimationFrame = (draw) => request((at) => {
  animates = true;
  try { draw(at); } finally { animates = false; }
});
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...given) {
  if (animates && this.canvas.closest(".picture")) window.moved += 1;
  return clear.apply(this, given);
};
"""


@pytest.fixture(scope="module", autouse=True)
def work(pool: Pool) -> None:
    """Something in most lists: jobs, a batch with errors, and a key with limits."""
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}]}
    refused = {**hello, "messages": []}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions"}
        | {"body": body}
        for number, body in enumerate([hello] * 9 + [refused] * 3)
    ]
    with pool.client() as client:
        data = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("requests.jsonl", data), purpose="batch")
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        key = {"name": "marie", "tokens_per_day": 1000, "expires_in": 86400}
        client.post(f"{pool.url}/admin/keys", cast_to=object, body=key)


def settle(visiting: Visitor, view: str) -> None:
    visiting.go(f"#/{view}")
    page = visiting.page
    page.locator("main h1").wait_for(state="attached")  # phones may hide it
    expect(page.locator(".loading")).to_have_count(0)


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", SIZES)
def test_views_are_accessible_and_fit(
    engine: Browser, pool: Pool, size: str, theme: str
) -> None:
    with visitor(engine, pool.url, size, color_scheme=theme) as visiting:
        visiting.go()
        visiting.page.get_by_label("API key", exact=True).wait_for()
        assert visiting.barriers() == []
        visiting.sign_in(KEY)
        found: dict[str, object] = {}
        for view in VIEWS:
            settle(visiting, view)
            visiting.save(f"{view}-{size}-{theme}")
            if barriers := visiting.barriers():
                found[view] = barriers
            beyond = visiting.page.evaluate(
                "document.documentElement.scrollWidth - innerWidth"
            )
            if beyond > 0:
                found[f"{view}, its width"] = beyond
            if cut := visiting.page.evaluate(CUT_OFF):
                found[f"{view}, its tables"] = cut
    assert found == {}


def test_phone_shows_state_and_slots_of_machines(pool: Pool, engine: Browser) -> None:
    with visitor(engine, pool.url, "phone") as visiting:
        visiting.sign_in(KEY)
        visiting.go("#/nodes")
        row = visiting.page.get_by_role("row", name="collie")
        expect(row.get_by_text("active", exact=True)).to_be_in_viewport(ratio=1)
        expect(row.get_by_text("0/4")).to_be_in_viewport(ratio=1)

        visiting.go("#/pool")
        tile = visiting.page.get_by_role("article").filter(has_text="beagle")
        expect(tile.get_by_role("img", name="0 of 4 slots busy")).to_be_in_viewport()


def test_keyboard_reaches_everything(admin: Visitor) -> None:
    page = admin.page
    keyboard = page.keyboard

    keyboard.press("?")
    shortcuts = page.get_by_role("dialog", name="Shortcuts")
    expect(shortcuts).to_be_visible()
    keyboard.press("Escape")
    expect(shortcuts).to_have_count(0)
    page.clock.set_fixed_time(datetime.now())  # keys belong together for a while only
    keyboard.press("g")
    keyboard.press("n")
    search = page.get_by_label("Filter machines")
    expect(search).to_be_visible()
    keyboard.press("/")
    expect(search).to_be_focused()
    keyboard.type("coll")
    expect(page.get_by_role("button", name="beagle", exact=True)).to_have_count(0)
    machine = page.get_by_role("button", name="collie", exact=True)
    for _ in range(20):
        keyboard.press("Tab")
        if machine.evaluate("button => button === document.activeElement"):
            break
    width = machine.evaluate(
        "button => parseFloat(getComputedStyle(button).outlineWidth)"
    )
    assert width >= 2  # the focus is visible
    keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="collie")).to_be_visible()
    keyboard.press("Escape")
    expect(machine).to_be_focused()


def test_palette_finds_machines_once_they_are_known(stranger: Visitor) -> None:
    page, held = stranger.page, list[Route]()
    page.route("**/admin/live", lambda route: held.append(route))
    with page.expect_request("**/admin/live"):
        stranger.sign_in(KEY)

    page.keyboard.press("Control+k")
    palette = page.get_by_role("dialog", name="Go to")
    palette.get_by_role("combobox").fill("beag")
    expect(palette.get_by_text("Waiting for the coordinator")).to_be_visible()
    expect(palette.get_by_text("Nothing found")).to_have_count(0)
    held[0].continue_()
    expect(palette.get_by_role("option", name="beagle")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="beagle")).to_be_visible()


def test_theme_follows_the_system_until_it_is_chosen(
    engine: Browser, pool: Pool
) -> None:
    with visitor(engine, pool.url, color_scheme="dark") as visiting:
        visiting.sign_in(KEY)
        root = visiting.page.locator("html")
        expect(root).to_have_attribute("data-theme", "dark")
        visiting.page.emulate_media(color_scheme="light")
        expect(root).to_have_attribute("data-theme", "light")
        visiting.page.get_by_role("button", name="Dark or light").click()
        expect(root).to_have_attribute("data-theme", "dark")
        visiting.page.reload()
        expect(root).to_have_attribute("data-theme", "dark")


def test_page_is_still_for_those_who_want_no_motion(
    engine: Browser, pool: Pool
) -> None:
    with visitor(engine, pool.url, reduced_motion="reduce") as visiting:
        page = visiting.page
        page.add_init_script(COUNT_FRAMES)
        visiting.sign_in(KEY)
        picture = page.get_by_role("region", name="The machines of the pool")
        expect(picture).to_be_visible()

        with pool.client() as client:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ping"}]
            )

        latest = page.locator(".latest li")
        expect(latest.filter(has_text="done by").first).to_be_visible()
        page.evaluate("new Promise((done) => requestAnimationFrame(done))")
        assert page.evaluate("window.moved") == 0
