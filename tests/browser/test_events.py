"""The list of events, as they happen."""

from playwright.sync_api import expect

from browser.chromium import Visitor
from live.programs import Pool, eventually

DROPPING = """
const add = EventSource.prototype.addEventListener;
window.completed = 0;
EventSource.prototype.addEventListener = function (type, listener) {
  add.call(this, type, type !== "facts" ? listener : (event) => {
    if (!window.dropping) return listener(event);
    window.completed += event.data.split("JobCompleted").length - 1;
  });
};
"""


def test_events_that_the_feed_left_out_are_requested(
    admin: Visitor, pool: Pool
) -> None:
    ask(pool)
    admin.page.add_init_script(DROPPING)
    admin.go("#/events")
    page = admin.page
    page.reload()
    rows = page.locator("tbody tr:not(.spacer)")
    done = rows.get_by_text("job completed", exact=True)
    expect(done).to_have_count(1)
    ask(pool)
    expect(done).to_have_count(2)
    page.evaluate("window.dropping = true")
    ask(pool)
    eventually(lambda: page.evaluate("window.completed"), "one is dropped")
    page.evaluate("window.dropping = false")

    ask(pool)

    expect(done).to_have_count(4)
    eventually(
        lambda: rows.count() == len(pool.admin("events?limit=1000")["data"]),
        "all events are listed",
    )


def ask(pool: Pool) -> None:
    with pool.client() as client:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ping"}], max_tokens=3
        )
