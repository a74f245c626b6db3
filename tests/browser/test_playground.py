"""The playground, in a real browser, with real workers."""

import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.chromium import SHOTS, Visitor, visitor
from harness.speed import PATIENCE
from live.programs import KEY, TINY, GatedModel, Pool, Program, Programs, eventually
from models.tiny_answers import ANSWERS, STORY
from models.tool_answers import COLOUR, TOOLS_GGUF

ASK = "Tell me a story."
BEGUN = "".join(ANSWERS[ASK][:5])  # what the slow model sends before it waits


OpenPage = Callable[[Pool], Page]


@pytest.fixture
def open_page(engine: Browser) -> Iterator[OpenPage]:
    """Opens the dashboard of a pool, signed in."""
    with ExitStack() as stack:

        def sign_in(pool: Pool) -> Page:
            visiting = stack.enter_context(visitor(engine, pool.url))
            visiting.sign_in(KEY)
            return visiting.page

        yield sign_in


def test_answer_streams_and_names_its_worker(
    programs: Programs, open_page: OpenPage
) -> None:
    pool = programs.serve()
    pool.joined("beagle")
    page = playground(open_page(pool))

    ask(page, ASK)

    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer.locator(".md")).to_have_text(STORY)
    expect(answer.locator("[data-stat=worker]")).to_have_text("beagle")
    expect(answer.locator("[data-stat=tokens]")).to_have_text(re.compile(r"^\d+$"))
    expect(answer.locator("[data-stat=first]")).to_have_text(re.compile(r" m?s$"))
    (job,) = pool.admin("jobs")["data"]
    for name, view in (("Timeline", "jobs"), ("Receipt", "receipts")):
        link = answer.get_by_role("link", name=name)
        expect(link).to_have_attribute("href", f"#/{view}/{job['id']}")

    ask(page, "ping")

    expect(page.get_by_role("article", name="Answer of tiny")).to_have_count(2)
    # It is the same conversation as long as the page is open.
    page.get_by_role("link", name="Receipts").first.click()
    expect(page.get_by_role("heading", name="Receipts", level=1)).to_be_visible()
    page.go_back()
    expect(page.get_by_role("article", name="Answer of tiny")).to_have_count(2)
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("article")).to_have_count(0)


def test_draft_stays_while_one_looks_elsewhere(admin: Visitor) -> None:
    page = playground(admin.page)
    page.get_by_role("textbox", name="Message").fill("What makes the tides?")

    page.get_by_role("link", name="Receipts").first.click()
    expect(page.get_by_role("heading", name="Receipts", level=1)).to_be_visible()
    page.go_back()

    draft = page.get_by_role("textbox", name="Message")
    expect(draft).to_have_value("What makes the tides?")


def test_stop_cancels_the_job(
    programs: Programs, open_page: OpenPage, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    page = playground(open_page(pool))
    ask(page, ASK)
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer.locator(".md")).to_have_text(BEGUN.strip())

    page.get_by_role("button", name="Stop", exact=True).click()

    expect(answer).to_contain_text("Stopped: the job was cancelled.")
    (job,) = pool.admin("jobs")["data"]
    eventually(
        lambda: pool.admin(f"jobs/{job['id']}")["state"] == "cancelled",
        "the job is cancelled",
    )
    eventually(
        lambda: not any(each["busy"] for each in pool.workers()), "the worker is free"
    )


def test_answer_that_a_restart_interrupts_is_fetched(
    programs: Programs, engine: Browser, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("slow", *slow_model.flags)
    with visitor(engine, pool.url) as visiting:
        visiting.sign_in(KEY)
        page = playground(visiting.page)
        ask(page, ASK)
        answer = page.get_by_role("article", name="Answer of tiny")
        expect(answer.locator(".md")).to_have_text(BEGUN.strip())

        pool.program.kill()
        programs.serve(port=pool.port)
        slow_model.go_on.set()

        expect(answer.locator(".md")).to_have_text(STORY)
        said = page.get_by_role("status").filter(has_text="tiny")
        expect(said).to_have_text("tiny has answered")
        visiting.faults.clear()  # connections that were cut and refused


def test_several_models_answer_side_by_side(
    programs: Programs, open_page: OpenPage, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("one", "--model", f"tiny={TINY}", "--model", f"also={TINY}")
    page = playground(open_page(pool), models=2)

    page.get_by_role("button", name="Add a model").click()
    columns = page.locator(".column")
    columns.nth(0).get_by_label("Model", exact=True).select_option("tiny")
    columns.nth(1).get_by_label("Model", exact=True).select_option("also")
    ask(page, ASK)

    for name in ("tiny", "also"):
        answer = page.get_by_role("article", name=f"Answer of {name}")
        expect(answer.locator(".md")).to_have_text(STORY)
    page.screenshot(path=SHOTS / "playground.png")


def test_takeover_is_shown_at_its_place(
    programs: Programs, open_page: OpenPage, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    workers = {
        name: pool.joined(name, *slow_model.flags) for name in ("beagle", "poodle")
    }
    page = playground(open_page(pool))
    # Another worker repeats what leaves nothing to chance.
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("spinbutton", name="Temperature").fill("0")
    ask(page, ASK)
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer.locator(".md")).to_have_text(BEGUN.strip())

    lost = kill_busy(pool, workers)
    (heir,) = workers.keys() - {lost}
    slow_model.go_on.set()

    mark = answer.locator(".md .takeover")
    expect(mark).to_have_text(f"{heir} went on")
    expect(answer.get_by_text("attempt 2")).to_be_visible()
    expect(answer.locator("[data-stat=worker]")).to_have_text(heir)
    expect(answer.locator(".takeover-line")).to_contain_text(
        f"{lost} stopped in the middle of this answer: {heir} took over."
        " Nothing is repeated or left out."  # said when the answer is whole
    )
    page.screenshot(path=SHOTS / "takeover.png")
    text = answer.locator(".md").inner_text()
    assert text.replace("\xa0", " ").startswith(BEGUN.strip())
    whole = text.replace(mark.inner_text(), "")
    assert re.sub(r"\s+", "", whole) == re.sub(r"\s+", "", STORY)


def test_tools_are_called_and_answered(programs: Programs, open_page: OpenPage) -> None:
    pool = programs.serve()
    pool.joined("one", "--model", f"tools={TOOLS_GGUF}")
    page = playground(open_page(pool))
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("spinbutton", name="Temperature").fill("0")
    tools = page.get_by_label("Tools, as JSON")
    tools.fill("[{")
    expect(page.locator("#tools-note")).to_contain_text("Not JSON")
    tools.fill("")
    page.get_by_role("button", name="Insert an example").click()
    expect(page.locator("#tools-note")).to_have_text("1 tool")

    ask(page, "What is the weather in Paris?")
    page.get_by_label("Result of get_weather").fill('{"celsius": 21}')
    expect(page.locator(".call pre")).to_contain_text('"city": "Paris"')
    page.get_by_role("button", name="Send the result").click()

    last = page.get_by_role("article", name="Answer of tools").last
    expect(last.locator("[data-stat=worker]")).to_be_visible()
    expect(page.locator(".said.tool")).to_contain_text("21")


def test_image_is_attached_and_seen(programs: Programs, open_page: OpenPage) -> None:
    pool = programs.serve()
    pool.joined("one", "--model", f"tools={TOOLS_GGUF}")
    page = playground(open_page(pool))

    page.get_by_label("Attach images").set_input_files(
        {"name": "red.png", "mimeType": "image/png", "buffer": png(255, 0, 0)}
    )
    expect(page.get_by_role("img", name="Image 1")).to_be_visible()
    ask(page, COLOUR)

    expect(page.get_by_role("article", name="Answer of tools")).to_contain_text("Red.")


def test_code_of_a_request_runs(
    programs: Programs, open_page: OpenPage, tmp_path: Path
) -> None:
    pool = programs.serve()
    pool.joined("one")
    page = playground(open_page(pool))
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be 'brief', \"please\".\nÄ")
    page.get_by_role("spinbutton", name="Temperature").fill("0")
    ask(page, "ping")
    page.get_by_role("button", name="Code").click()
    dialog = page.get_by_role("dialog")

    shell = dialog.locator(".copy code").inner_text()
    dialog.get_by_role("button", name="Python").click()
    python = dialog.locator(".copy code").inner_text()

    lines = run(["sh", "-c", shell], tmp_path).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data")]
    assert events.pop() == "[DONE]"
    choices = [each for event in events for each in json.loads(event)["choices"]]
    text = "".join(each["delta"].get("content") or "" for each in choices)
    assert text
    assert run([sys.executable, "-c", python], tmp_path) == f"{text}\n"


def test_error_of_a_request_is_shown(programs: Programs, engine: Browser) -> None:
    pool = programs.serve("--queue-wait", "1")
    worker = pool.joined("one")
    with visitor(engine, pool.url) as visiting:
        visiting.sign_in(KEY)
        page = playground(visiting.page)
        ask(page, "ping")
        answers = page.get_by_role("article", name="Answer of tiny")
        expect(answers.get_by_role("button", name="Again")).to_be_visible()
        worker.kill()
        eventually(lambda: not pool.workers(), "the worker has gone")

        answers.get_by_role("button", name="Again").click()

        expect(answers.get_by_role("alert")).to_contain_text("tiny")
        assert all("v1/chat/completions" in each for each in visiting.faults)
        visiting.faults.clear()  # browsers log each answer that is an error


def playground(page: Page, models: int = 1) -> Page:
    """Go to the playground, and wait until it offers so many models."""
    page.goto(f"{page.url.split('#')[0]}#/playground")
    expect(page.locator(".column option")).to_have_count(models)
    return page


def ask(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def kill_busy(pool: Pool, workers: dict[str, Program]) -> str:
    """Kill the worker that has the job; return its name."""
    (busy,) = [each["id"] for each in pool.workers() if each["busy"]]
    (name,) = [name for name in workers if f":{name}/" in busy]
    workers[name].kill()
    return name


def run(command: list[str], folder: Path) -> str:
    ran = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "SHOAL_API_KEY": KEY, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def png(*rgb: int) -> bytes:
    """Return an image of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return (
            struct.pack(">I", len(data))
            + checked
            + struct.pack(">I", zlib.crc32(checked))
        )

    size = 64
    row = b"\0" + bytes(rgb) * size
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(row * size))
        + chunk(b"IEND", b"")
    )
