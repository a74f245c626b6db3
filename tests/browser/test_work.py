"""Jobs, models, events and keys on the page."""

import re

import pytest
from playwright.sync_api import Browser, expect

from browser.chromium import Visitor, visitor
from live.programs import KEY, PATIENCE, PRICES, Pool, Programs


@pytest.fixture(scope="module")
def job(pool: Pool) -> str:
    """A chat that is done."""
    with pool.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "count"}], max_tokens=9
        )
    return answer.id.removeprefix("chatcmpl-")


def test_job_has_a_timeline_and_an_explanation(admin: Visitor, job: str) -> None:
    admin.go("#/jobs")
    page = admin.page
    page.get_by_role("button", name=f"Job {job}, done").click()

    course = page.locator(".course li")
    expect(course.filter(has_text="submitted").first).to_be_visible()
    for step in ("assigned", "first token", "done"):
        expect(course.get_by_text(step, exact=True)).to_be_visible()
    explained = page.locator(
        "section", has=page.get_by_role("heading", name="Explanation")
    )
    expect(explained).to_contain_text("given to")
    expect(page.get_by_role("img", name="queued")).to_be_visible()
    admin.save("job")


def test_jobs_are_searched_and_say_where_and_how_many(admin: Visitor, job: str) -> None:
    admin.go("#/jobs")
    page = admin.page
    search = page.get_by_role("searchbox", name="Search jobs")
    rows = page.locator("tbody tr:not(.spacer)")

    search.fill("nothing like that")
    search.press("Enter")
    expect(page.get_by_text("No job matches")).to_be_visible()

    search.fill(job)
    search.press("Enter")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(job)
    expect(rows.get_by_text("shoal:")).to_be_visible()
    expect(rows.locator("[title$=' written']")).to_be_visible()
    admin.save("jobs")


TYPES_AT_ONCE = """view => {
  new MutationObserver((_, observer) => {
    const field = document.querySelector("input[data-search]");
    if (!field) return;
    observer.disconnect();
    field.value = "t";
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }).observe(document.body, { childList: true, subtree: true });
  location.hash = view;
}"""
"""Opens a view, and types into its search as soon as the page has the field."""


@pytest.mark.parametrize("view", ["jobs", "models"])
def test_text_typed_while_a_view_opens_is_kept(
    admin: Visitor, job: str, view: str
) -> None:
    admin.go("#/receipts")

    admin.page.evaluate(TYPES_AT_ONCE, f"#/{view}")

    shown = job if view == "jobs" else "tiny"  # loaded after the view has opened
    expect(admin.page.get_by_role("main").get_by_text(shown).first).to_be_visible()
    assert admin.page.get_by_role("searchbox").input_value() == "t"


def test_new_job_appears_while_one_looks(admin: Visitor, pool: Pool) -> None:
    admin.go("#/jobs?state=done")
    rows = admin.page.locator("tbody tr:not(.spacer)")
    admin.page.locator("table, .empty").first.wait_for()
    before = rows.count()

    ask(pool)

    expect(rows).to_have_count(before + 1)


def test_jobs_stay_while_they_cannot_be_read(
    admin: Visitor, pool: Pool, job: str
) -> None:
    admin.go("#/jobs")
    page = admin.page
    listed = page.get_by_role("button", name=f"Job {job}, done")
    expect(listed).to_be_visible()

    page.route("**/admin/jobs?*", lambda route: route.abort())
    ask(pool)
    expect(page.get_by_role("alert")).to_be_visible(timeout=1000 * PATIENCE)
    expect(listed).to_be_visible()
    page.unroute("**/admin/jobs?*")
    ask(pool)

    expect(page.get_by_role("alert")).to_have_count(0, timeout=1000 * PATIENCE)
    admin.faults.clear()  # the requests that failed


def test_unknown_job_says_why(admin: Visitor) -> None:
    admin.go("#/jobs/nothing-like-that")

    expect(admin.page.get_by_role("alert")).to_contain_text("there is no job")
    admin.faults.clear()  # how browsers log an answer of 404


def test_events_come_live_and_can_be_filtered(admin: Visitor, job: str) -> None:
    admin.go("#/events")
    page = admin.page
    rows = page.locator("tbody tr")

    expect(rows.get_by_text("job completed", exact=True).first).to_be_visible()
    expect(rows.get_by_text("worker joined", exact=True).first).to_be_visible()
    page.get_by_label("Filter events").fill("joined")
    expect(rows.get_by_text("job completed", exact=True)).to_have_count(0)
    admin.go(f"#/events?job={job}")
    page.get_by_label("Filter events").fill("")
    expect(rows.get_by_text("worker joined", exact=True)).to_have_count(0)


def test_paused_events_stand_still_when_the_coordinator_comes_back(
    engine: Browser, programs: Programs
) -> None:
    first = programs.serve()
    with visitor(engine, first.url) as visiting:
        visiting.follow(first.ready["dashboard"])
        visiting.go("#/events")
        page = visiting.page
        page.get_by_role("button", name="Pause").click()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))

        first.program.kill()
        page.get_by_text("The coordinator does not answer", exact=True).wait_for()
        second = programs.serve(port=first.port)
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        second.joined("beagle")
        page.evaluate("new Promise((done) => setTimeout(done))")  # what follows from it

        assert not any("/admin/events" in each for each in asked)
        page.get_by_role("button", name="Resume").click()
        joined = page.locator("tbody tr").get_by_text("worker joined", exact=True)
        expect(joined.first).to_be_visible()
        visiting.faults.clear()  # connections that were refused meanwhile


def test_models_say_where_they_are(admin: Visitor) -> None:
    admin.go("#/models")
    page = admin.page
    expect(page.get_by_text("stop strings").first).to_be_visible()
    page.get_by_role("button", name="tiny", exact=True).click()
    details = page.get_by_role("dialog", name="tiny")

    expect(details.get_by_role("link", name="beagle")).to_be_visible()
    details.get_by_role("link", name="collie").click()
    expect(page.get_by_role("dialog", name="collie")).to_be_visible()


def test_models_say_what_aliases_stand_for(admin: Visitor, pool: Pool) -> None:
    with pool.client() as client:
        path = f"{pool.url}/admin/aliases/gpt-4o-mini"
        client.put(path, body={"models": ["absent", "tiny"]}, cast_to=object)
    admin.go("#/jobs")
    admin.go("#/models")
    page = admin.page
    section = page.locator("section", has=page.get_by_role("heading", name="Aliases"))

    row = section.get_by_role("listitem").filter(has_text="gpt-4o-mini")
    expect(row).to_contain_text("absent, tiny · now tiny")
    admin.save("models")


def test_key_is_made_shown_once_and_revoked(admin: Visitor, pool: Pool) -> None:
    admin.go("#/keys")
    page = admin.page
    page.get_by_role("button", name="New key").click()
    form = page.get_by_role("dialog", name="New API key")
    form.get_by_label("Name").fill("laptop")
    form.get_by_label("Tokens per day").fill("1000")
    form.get_by_label("Hosted providers after").fill("20")
    form.get_by_role("button", name="Create the key").click()

    shown = page.get_by_text("The key laptop is shown only once")
    expect(shown).to_be_visible()
    page.get_by_role("button", name="Done").click()
    expect(shown).to_have_count(0)
    row = page.get_by_role("row").filter(has_text="laptop")
    expect(row.get_by_title("Hosted providers may answer after 20 s")).to_be_visible()
    page.get_by_role("button", name="Revoke laptop").click()
    asked = page.get_by_role("dialog", name="Revoke laptop?")
    asked.get_by_role("button", name="Revoke", exact=True).click()
    expect(page.get_by_role("button", name="Revoke laptop")).to_have_count(0)

    stored = {each["name"]: each for each in pool.admin("keys")["data"]}
    assert stored["laptop"]["tokens_per_day"] == 1000
    assert stored["laptop"]["hosted_after"] == 20
    assert stored["laptop"]["revoked_at"] is not None


def test_account_of_a_machine_has_its_name(engine: Browser, programs: Programs) -> None:
    pool = programs.serve(*PRICES)
    pool.joined("beagle")
    ask(pool)
    with visitor(engine, pool.url) as visiting:
        visiting.sign_in(KEY)
        visiting.go("#/keys")
        page = visiting.page

        earned = page.get_by_role("row", name="beagle")
        expect(earned).to_contain_text("$")
        expect(
            page.get_by_role("row", name=re.compile("the pool.s fees"))
        ).to_be_visible()


def ask(pool: Pool) -> None:
    """Ask the model something short."""
    with pool.client() as client:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
