"""How people come in: with a key, with a link, and as somebody who may only look."""

from contextlib import suppress

from playwright.sync_api import Browser, Error, Route, expect

from browser.chromium import Visitor, visitor
from live.programs import Pool, Programs
from shoal.coordinator.auth_throttle import BLOCK_AFTER


def created_key(pool: Pool, name: str, scope: str) -> str:
    with pool.client() as client:
        made = client.post(
            f"{pool.url}/admin/keys",
            cast_to=object,
            body={"name": name, "scope": scope},
        )
    assert isinstance(made, dict)
    return str(made["key"])


def test_first_visit_says_how_to_sign_in(stranger: Visitor) -> None:
    stranger.go()
    page = stranger.page

    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    expect(page.get_by_text("shoal dashboard")).to_be_visible()
    expect(page.get_by_role("navigation")).to_have_count(0)
    stranger.save("sign-in")


def test_wrong_key_is_told(stranger: Visitor) -> None:
    stranger.go()
    stranger.page.get_by_label("API key", exact=True).fill("sk-live-wrong")
    stranger.page.get_by_role("button", name="Sign in").click()

    expect(stranger.page.get_by_role("alert")).to_contain_text("shoal keys create NAME")


def test_too_many_attempts_say_how_long_to_wait(
    engine: Browser, programs: Programs
) -> None:
    pool = programs.serve()

    with visitor(engine, pool.url) as guessing:
        guessing.go()
        page = guessing.page
        for number in range(BLOCK_AFTER):  # without the page: they count for a while
            guessing.context.request.post(
                f"{pool.url}/dashboard/session",
                headers={"x-shoal-page": "1"},
                data={"api_key": f"sk-live-wrong-{number}"},
            )
        page.get_by_label("API key", exact=True).fill("sk-live-wrong")
        with page.expect_response("**/dashboard/session") as answered:
            page.get_by_role("button", name="Sign in").click()
        assert answered.value.status == 429
        expect(page.get_by_role("alert")).to_contain_text("try again in")
        guessing.faults.clear()  # the requests that were refused


def test_key_signs_in_until_signed_out(admin: Visitor) -> None:
    page = admin.page

    expect(page.get_by_role("heading", name="Pool", exact=True)).to_be_visible()
    expect(page.get_by_text("No action needed.")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Pool", exact=True)).to_be_visible()

    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()


def test_nothing_is_left_of_who_signed_out(admin: Visitor, pool: Pool) -> None:
    page = admin.page
    page.evaluate("window.left = true")  # what a page keeps until it is loaded again
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()
    assert page.evaluate("window.left") is None

    admin.sign_in(created_key(pool, "next", "use"))

    expect(page.get_by_role("heading", name="Models")).to_be_visible()


def test_no_request_outlives_its_session(admin: Visitor) -> None:
    page, held = admin.page, list[Route]()

    def end(route: Route) -> None:
        answered = route.fetch()
        for late in held:
            with suppress(Error):  # the page has given it up
                late.continue_()
        route.fulfill(response=answered)

    page.route("**/admin/usage/minutes*", lambda route: held.append(route))
    with page.expect_request("**/admin/usage/minutes*"):
        page.reload()
    page.route("**/dashboard/session", end)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key", exact=True)).to_be_visible()

    assert held  # else a refused one would be on the console


def test_link_of_the_coordinator_signs_in_once(
    engine: Browser, programs: Programs
) -> None:
    pool = programs.serve()
    link = pool.ready["dashboard"]

    with visitor(engine, pool.url) as first:
        first.follow(link)
        expect(first.page.get_by_text("ready for its first machine")).to_be_visible()
        assert "signin" not in first.page.url
    with visitor(engine, pool.url) as second:
        second.page.goto(link)
        alert = second.page.get_by_role("alert")
        expect(alert).to_contain_text("`shoal dashboard` prints another one")
        expect(second.page.get_by_label("API key", exact=True)).to_be_visible()


def test_empty_pool_says_how_machines_join(engine: Browser, programs: Programs) -> None:
    pool = programs.serve()

    with visitor(engine, pool.url) as first:
        first.follow(pool.ready["dashboard"])
        expect(
            first.page.get_by_text("No machine has joined yet", exact=True)
        ).to_be_visible()
        expect(first.page.get_by_text(f"shoal join {pool.url}")).to_be_visible()
        first.save("empty-pool")
        pool.joined("beagle")
        expect(first.page.get_by_role("button", name="beagle")).to_be_visible()


def test_monitor_sees_all_and_changes_nothing(engine: Browser, pool: Pool) -> None:
    key = created_key(pool, "wall", "monitor")

    with visitor(engine, pool.url) as watcher:
        watcher.sign_in(key)
        page = watcher.page
        expect(page.get_by_role("button", name="beagle")).to_be_visible()
        for name in ("Add a machine", "Drain", "Pause", "Remove", "Approve"):
            expect(page.get_by_text(name, exact=True)).to_have_count(0)
        watcher.go("#/nodes")
        page.get_by_role("button", name="beagle").click()
        expect(page.get_by_role("dialog", name="beagle")).to_be_visible()
        for name in ("Drain", "Pause", "Remove"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        expect(page.get_by_role("link", name="Keys")).to_have_count(0)


def test_user_of_models_sees_what_is_theirs(engine: Browser, pool: Pool) -> None:
    key = created_key(pool, "marie", "use")

    with visitor(engine, pool.url) as user:
        user.sign_in(key)
        page = user.page
        views = page.get_by_role("navigation", name="Views", exact=True)
        for name in ("Playground", "Jobs", "Models", "Usage"):
            expect(views.get_by_role("link", name=name)).to_be_visible()
        for name in ("Pool", "Nodes", "Keys", "Events"):
            expect(views.get_by_role("link", name=name, exact=True)).to_have_count(0)
        user.go("#/jobs")
        expect(page.get_by_text("No job was submitted yet")).to_be_visible()


def test_revoked_key_ends_the_session(engine: Browser, pool: Pool) -> None:
    key = created_key(pool, "brief", "admin")

    with visitor(engine, pool.url) as user:
        user.sign_in(key)
        expect(user.page.get_by_role("button", name="beagle")).to_be_visible()
        with pool.client() as client:
            client.delete(f"{pool.url}/admin/keys/brief", cast_to=object)
        # The page finds out by itself.
        expect(user.page.get_by_text("The session has ended")).to_be_visible()
        user.faults.clear()  # the request that was refused
