"""The views at the sizes of a desk and of a phone, in both themes."""

import pytest
from playwright.sync_api import Browser, expect

from browser.chromium import visitor
from live.programs import KEY, Pool

VIEWS = ("playground", "receipts", "runs", "batches", "usage")


@pytest.mark.parametrize(("size", "theme"), [("desktop", "dark"), ("phone", "light")])
def test_views_fit_and_have_no_barriers(
    pool: Pool, engine: Browser, size: str, theme: str
) -> None:
    with pool.client() as client:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ping"}]
        )
    with visitor(engine, pool.url, size) as visiting:
        visiting.page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
        visiting.sign_in(KEY)
        page = visiting.page
        for view in VIEWS:
            visiting.go(f"#/{view}")
            expect(page.get_by_role("heading", level=1)).to_be_attached()
            expect(page.locator("main .loading")).to_have_count(0)

            assert visiting.barriers() == [], view
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= page.evaluate("innerWidth"), view
            visiting.save(f"{view}-{size}-{theme}")


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
