"""What belongs to a new kind of job, command, view of the dashboard or field."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from shoal.cli.main import shoal
from shoal.domain.job_kinds import INFERENCE_KINDS
from shoal.domain.work import JobKind
from shoal.gateway.jobs.job_view import JobInfo, JobListEntry

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "src" / "shoal" / "dashboard_files"
PAGES = {
    page: page.read_text("utf-8")
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "decisions" not in page.relative_to(ROOT).parts
}


@pytest.mark.parametrize("kind", JobKind)
def test_the_page_of_receipts_describes_the_request_of_each_kind(kind: JobKind) -> None:
    assert f"| `{kind.name.lower()}` | `" in PAGES[ROOT / "docs" / "receipts.md"]


@pytest.mark.parametrize("kind", sorted(kind.value for kind in INFERENCE_KINDS))
def test_the_list_of_models_describes_each_kind(kind: str) -> None:
    page = PAGES[ROOT / "docs" / "api.md"]
    (row,) = re.findall(r"^\| `kinds` \|(.+)\|$", page, re.M)

    assert f"`{kind}`" in row


def commands(group: click.Group, words: tuple[str, ...]) -> Iterator[str]:
    """Yield all commands, each with the groups that it is in."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group) and command.list_commands(context):
            yield from commands(command, (*words, name))
        else:
            yield " ".join((*words, name))


@pytest.mark.parametrize("command", [*commands(shoal, ("shoal",))])
def test_a_page_shows_each_command(command: str) -> None:
    shown = re.compile(rf"\b{command}\b")

    assert any(map(shown.search, PAGES.values())), (
        f"no page of docs/ shows `{command}`: show it where its task is described"
    )


def views() -> set[str]:
    return {each.stem for each in (DASHBOARD / "views").glob("*.js")}


def test_each_view_has_an_entry_an_icon_and_a_line() -> None:
    entries = re.findall(
        r"{ id: \"(\w+)\", title: \"(\w+)\", group: \"\w+\", key: \"(\w)\"",
        (DASHBOARD / "app.js").read_text(),
    )
    icons = re.findall(
        r"^  (\w+):", (DASHBOARD / "parts" / "icons.js").read_text(), re.M
    )
    page = PAGES[ROOT / "docs" / "dashboard.md"]

    listed = {name for name, _, _ in entries}
    assert listed == views(), "VIEWS in app.js and the modules of views/ differ"
    assert not views() - {*icons}, "views without a path in parts/icons.js"
    assert len({key for *_, key in entries}) == len(entries), (
        "two views have the same key"
    )
    undescribed = [title for _, title, _ in entries if f"| {title} |" not in page]
    assert not undescribed, "views without a line in the table of docs/dashboard.md"


@pytest.mark.parametrize("field", JobInfo.__struct_fields__)
def test_a_page_describes_each_field_of_a_job(field: str) -> None:
    described = re.compile(rf"[`\"]{field}[`\"]")

    assert described.search(PAGES[ROOT / "docs" / "jobs.md"]), (
        f"docs/jobs.md does not describe the field {field!r} of a job"
    )


def test_a_job_has_the_fields_of_its_entry_in_a_list() -> None:
    missing = {*JobListEntry.__struct_fields__} - {*JobInfo.__struct_fields__}

    assert not missing, (
        f"add {missing} to JobInfo, which repeats JobListEntry in the original's order"
    )
