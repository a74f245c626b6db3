"""Receipts that the page verifies by itself."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from browser.chromium import Visitor
from live.programs import KEY, Pool

STEPS = (
    *("FORM", "KEY", "SIGNATURE", "RECEIPT", "CHECKPOINT"),
    *("LOGGED", "OUTPUT", "WORKER"),
)


@pytest.fixture(scope="module")
def job(pool: Pool) -> str:
    """A chat that is done, after another one."""
    with pool.client() as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ping"}]
            )
    return answer.id.removeprefix("chatcmpl-")


@pytest.fixture
def bundle(pool: Pool, job: str, admin: Visitor) -> bytes:
    """The file of its receipt."""
    return admin.context.request.get(f"{pool.url}/v1/receipts/{job}").body()


def test_receipt_is_verified_without_the_coordinator(admin: Visitor, job: str) -> None:
    admin.go("#/receipts")
    page = admin.page
    page.get_by_role("button", name=f"Receipt of job {job}").click()
    verify = page.get_by_role("button", name="Verify", exact=True)
    expect(verify).to_be_enabled()

    admin.context.set_offline(True)
    verify.click()

    expect(page.locator(".outcome")).to_have_text("Verified")
    assert passed(page) == [*STEPS]
    admin.save("receipt")
    assert admin.barriers() == []
    admin.context.set_offline(False)
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    admin.faults.clear()  # the page noticed that it was offline


def test_file_of_a_receipt_is_exported_and_verified_again(
    admin: Visitor, job: str, bundle: bytes, tmp_path: Path
) -> None:
    admin.go(f"#/receipts/{job}")
    with admin.page.expect_download() as downloading:
        admin.page.get_by_role("link", name="Export").click()
    file = tmp_path / "receipt.json"
    downloading.value.save_as(file)

    assert file.read_bytes() == bundle
    open_file(admin.page, file)
    dialog = admin.page.get_by_role("dialog")
    expect(dialog.locator(".outcome")).to_have_text("Verified")


@pytest.mark.parametrize(
    ("old", "new", "failed"),
    [
        (b"pong", b"pang", "OUTPUT"),
        (b'"index":', b'"index": ', "FORM"),
        (b'\\"price\\":0', b'\\"price\\":1', "SIGNATURE"),
        (b"\\nat 20", b"\\nat 21", "CHECKPOINT"),
    ],
    ids=["the output", "a space", "the price", "the checkpoint's time"],
)
def test_altered_receipt_is_refused(
    admin: Visitor, bundle: bytes, tmp_path: Path, old: bytes, new: bytes, failed: str
) -> None:
    assert old in bundle
    file = tmp_path / "altered.json"
    file.write_bytes(bundle.replace(old, new, 1))
    admin.go("#/receipts")

    open_file(admin.page, file)

    dialog = admin.page.get_by_role("dialog")
    expect(dialog.locator(".outcome")).to_have_text("Not verified")
    expect(dialog.locator(".steps .bad")).to_have_attribute("data-step", failed)
    assert passed(admin.page) == [*STEPS[: STEPS.index(failed)]]


def test_key_of_the_first_visit_is_remembered(
    admin: Visitor, pool: Pool, job: str
) -> None:
    key = admin.context.request.get(f"{pool.url}/v1/log").json()["public_key"]
    admin.go("#/receipts")
    page = admin.page
    log = page.get_by_role("region", name="The log")
    expect(log).to_contain_text("trusted since first seen here")
    expect(log).to_contain_text("remembered from now on")
    page.get_by_role("link", name="Pool", exact=True).first.click()
    expect(page.get_by_role("heading", name="Pool", level=1)).to_be_visible()
    page.get_by_role("link", name="Receipts").first.click()
    expect(log).to_contain_text("unchanged since this browser last saw it")

    log.get_by_role("button", name="Compare or change").click()
    expect(page.get_by_role("dialog").locator("code").last).to_have_text(key)
    other = "5d" * 32
    page.get_by_label("Trust this key instead").fill(other)
    page.get_by_role("button", name="Pin this key").click()

    expect(log.get_by_role("alert")).to_contain_text("is not the trusted one")
    page.get_by_role("button", name=f"Receipt of job {job}").click()
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.locator(".steps .bad")).to_have_attribute("data-step", "KEY")


def test_log_that_grew_is_checked_with_each_visit(admin: Visitor, pool: Pool) -> None:
    admin.go("#/receipts")
    page = admin.page
    log = page.get_by_role("region", name="The log")
    expect(log).to_contain_text("remembered from now on")
    with pool.client() as client:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "ping"}]
        )

    held: list[Route] = []
    page.route("**/v1/log/growth?*", lambda route: held.append(route))
    with page.expect_request("**/v1/log/growth?*"):
        page.reload()
    expect(log).to_contain_text("being checked")
    held[0].continue_()

    expect(log).to_contain_text("only grew since this browser last saw it")
    remembered = json.loads(page.evaluate("localStorage.getItem('shoal-log')"))
    assert KEY not in json.dumps(remembered)


def open_file(page: Page, file: Path) -> None:
    page.get_by_label("Verify a file").set_input_files(file)


def passed(page: Page) -> list[str]:
    """Return the steps that succeeded, in order."""
    steps = page.locator(".steps .ok")
    return [
        str(steps.nth(number).get_attribute("data-step"))
        for number in range(steps.count())
    ]
