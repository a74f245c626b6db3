"""Usage and batches on the page, and the files that it offers."""

import csv
import io
import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Download, Locator, Page, expect

from browser.chromium import Visitor, visitor
from harness.slow_imports import openai
from live.programs import KEY, PATIENCE, GatedModel, Pool, Programs, eventually

TOKENS = 3
PAGE = 50  # batches of a page of the list
BEYOND_A_PAGE = """(page) =>
  document.querySelector("table").getAttribute("aria-rowcount") - 1 > page"""


@pytest.fixture(scope="module", autouse=True)
def used(pool: Pool) -> int:
    """How many requests were made."""
    with pool.client() as client:
        for _ in range(2):
            client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "count"}],
                max_tokens=TOKENS,
            )
    return 2


def test_usage_is_drawn_and_downloaded_as_csv(
    admin: Visitor, pool: Pool, tmp_path: Path
) -> None:
    admin.go("#/usage")
    page = admin.page
    with pool.client() as client:  # two days if midnight came between the requests
        days = client.get(f"{pool.url}/admin/usage?by=day", cast_to=dict)["data"]
    expect(page.locator(".day-bars rect")).to_have_count(len(days))
    row = page.locator("tbody tr").filter(has_text="tiny")
    expect(row).to_be_visible()
    assert admin.barriers() == []
    admin.save("usage")
    # Without prices there is no cost to show.
    expect(page.get_by_role("button", name="Cost")).to_have_count(0)

    file = downloaded(page, page.get_by_role("link", name="CSV"), tmp_path)

    rows = [*csv.DictReader(io.StringIO(file.read_text()))]
    assert {each["model"] for each in rows} == {"tiny"}
    assert all(each["node"].endswith(("beagle", "collie")) for each in rows)
    requests = sum(int(each["requests"]) for each in rows)
    written = sum(int(each["completion_tokens"]) for each in rows)
    usage = json.loads(
        page.evaluate("fetch('/admin/usage?by=model').then((found) => found.text())")
    )
    assert (requests, written) == (
        usage["data"][0]["requests"],
        usage["data"][0]["completion_tokens"],
    )
    assert requests >= 2


def test_usage_is_told_apart_by_machine_and_days(admin: Visitor) -> None:
    admin.go("#/usage")
    page = admin.page
    page.get_by_role("button", name="Machine").click()
    expect(
        page.locator("tbody tr")
        .filter(has_text="beagle")
        .or_(page.locator("tbody tr").filter(has_text="collie"))
        .first
    ).to_be_visible()
    chart = page.get_by_role("img", name="Tokens of 30 days by machine")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".day-tip")).to_be_visible()

    page.get_by_role("textbox", name="To").fill("2020-01-31")
    page.get_by_role("textbox", name="From").fill("2020-01-01")

    expect(page.get_by_text("No usage in this period")).to_be_visible()


def test_batch_is_followed_and_its_results_are_downloaded(
    admin: Visitor, pool: Pool, tmp_path: Path
) -> None:
    with pool.client() as client:
        batch = submitted(client, requests=3)
    admin.go("#/batches")
    page = admin.page
    page.get_by_role("button", name=f"Batch {batch}").click()

    expect(page.locator(".batch")).to_contain_text("3 of 3 requests")
    expect(page.locator(".batch .badge")).to_have_text("completed")
    assert admin.barriers() == []
    file = downloaded(page, page.get_by_role("link", name="Results"), tmp_path)

    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {each["custom_id"] for each in lines} == {"0", "1", "2"}


def test_batches_stay_live_beyond_a_page(admin: Visitor, pool: Pool) -> None:
    admin.go("#/batches")
    page = admin.page
    with pool.client() as client:
        for _ in range(PAGE + 1):
            submitted(client, content=b"nonsense\n")
        page.reload()
        row = page.locator("tbody tr:not(.spacer)").first
        expect(row).to_be_visible()
        page.locator(".table-end").scroll_into_view_if_needed()
        page.wait_for_function(BEYOND_A_PAGE, arg=PAGE)

        latest = submitted(client, content=b"nonsense\n")
        page.evaluate("scrollTo(0, 0)")

        expect(page.get_by_role("button", name=f"Batch {latest}")).to_be_visible(
            timeout=1000 * PATIENCE
        )


def test_errors_of_a_file_are_shown(admin: Visitor, pool: Pool) -> None:
    with pool.client() as client:
        batch = submitted(client, content=b"nonsense\n")
    admin.go(f"#/batches/{batch}")

    expect(admin.page.locator(".batch-errors li")).to_contain_text("Line 1")


def test_batch_is_cancelled(
    programs: Programs, engine: Browser, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    with pool.client() as client:
        batch = submitted(client, requests=9, question="Tell me a story.")
        with visitor(engine, pool.url) as visiting:
            visiting.sign_in(KEY)
            visiting.go(f"#/batches/{batch}")
            page = visiting.page
            page.get_by_role("button", name="Cancel", exact=True).click()
            page.get_by_role("button", name="Cancel the batch").click()

            expect(page.locator(".batch .badge")).to_have_text("cancelled")
        eventually(
            lambda: client.batches.retrieve(batch).status == "cancelled", "it ends"
        )


def submitted(
    client: "openai.OpenAI",
    requests: int = 0,
    content: bytes = b"",
    question: str = "ping",
) -> str:
    """Submit a batch; return its id."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}]}
    lines = [
        {"custom_id": str(each), "method": "POST", "url": "/v1/chat/completions"}
        | {"body": body}
        for each in range(requests)
    ]
    data = content or "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    return batch.id


def downloaded(page: Page, link: Locator, folder: Path) -> Path:
    """Follow a link to a file; return the file."""
    with page.expect_download() as downloading:
        link.click()
    download: Download = downloading.value
    file = folder / download.suggested_filename
    download.save_as(file)
    return file
