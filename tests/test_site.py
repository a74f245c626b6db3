"""The site of the documentation: how pages are copied, and what is a fault of it."""

import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    """The script that builds the site."""
    file = ROOT / "scripts" / "build_site.py"
    spec = importlib.util.spec_from_file_location("build_site", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named_pages(entries: object) -> Iterator[str]:
    """Yield the pages in a navigation, at any depth."""
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict | list):
        for each in entries.values() if isinstance(entries, dict) else entries:
            yield from named_pages(each)


def test_each_page_is_in_the_navigation(builder: ModuleType) -> None:
    text = (DOCS / "zensical.toml").read_text("utf-8")
    named = [*named_pages(tomllib.loads(text)["project"]["nav"])]
    pages = {
        place
        for place in builder.places().values()
        if place.endswith(".md")
        and (not place.startswith("decisions/") or place.endswith("README.md"))
    }

    assert sorted(named) == sorted({*pages, "python/shoal.html"})


@pytest.mark.parametrize(
    ("source", "link", "copied"),
    [
        ("docs/keys.md", "[jobs](jobs.md#gangs)", "[jobs](jobs.md#gangs)"),
        ("docs/keys.md", "[jobs.md](jobs.md)", "[Jobs over HTTP](jobs.md)"),
        (
            "docs/security.md",
            "[rules](../CONTRIBUTING.md#tests)",
            "[rules](project/CONTRIBUTING.md#tests)",
        ),
        ("CONTRIBUTING.md", "[the keys](docs/keys.md)", "[the keys](../keys.md)"),
        ("docs/promises.md", "[laws](../tests/live/laws.py)", "laws"),
        ("docs/keys.md", "[pages](protocols)", "[pages](protocols/README.md)"),
        ("docs/keys.md", "[Ray](https://docs.ray.io)", "[Ray](https://docs.ray.io)"),
        ("docs/keys.md", "```\n[a](no.md)\n```", "```\n[a](no.md)\n```"),
    ],
)
def test_links_lead_to_where_the_site_has_the_page(
    builder: ModuleType, source: str, link: str, copied: str
) -> None:
    assert builder.with_site_links(link, source) == copied


def test_link_to_a_missing_file_ends_the_build(builder: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no\.md does not exist"):
        builder.with_site_links("[a](no.md)", "docs/keys.md")


def test_links_that_lead_nowhere_are_faults(
    builder: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "b.html").write_text('<h2 id="here">B</h2>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a><a href="b.html#there">2</a><a href="c.html">3</a>'
    )

    assert [*builder.faults_of(tmp_path)] == [
        "a.html: b.html#there names no heading",
        "a.html: c.html does not exist",
    ]


@pytest.mark.parametrize(
    "tag",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        '<link rel="preconnect" href="https://example.org">',
        '<img src="https://example.org/a.png">',
    ],
)
def test_what_is_loaded_from_other_sites_is_a_fault(
    builder: ModuleType, tmp_path: Path, tag: str
) -> None:
    (tmp_path / "a.html").write_text(tag)

    (fault,) = builder.faults_of(tmp_path)

    assert fault.startswith("a.html: loads ")
    assert "example.org" in fault
