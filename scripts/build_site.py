"""Build the documentation as a site: ``build/site``, from ``docs/`` and other pages.

The pages are plain Markdown that a code host shows as it is, so that some of their
links lead out of ``docs/``.  A copy of them is made first, in which pages such as
CONTRIBUTING.md have a place, and links to other files of the repository are plain text.
Zensical makes the site of the copy, pdoc the reference of the Python API.  Then every
link of the result is followed, and nothing in it may be loaded from another site.

    python scripts/build_site.py
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from posixpath import normpath, relpath
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES = BUILD / "site-pages"  # the configuration names both
SITE = BUILD / "site"
CONFIGURATION = DOCS / "zensical.toml"

PROJECT = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "bench/RESULTS.md",
)
"""Pages outside of ``docs/``; in the site, they are in ``project/``."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^][`])+)\]\((?P<to>[^)\s]+)\)")
LOADED = {"img": "src", "script": "src", "iframe": "src", "source": "src"}
LOADING_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "prefetch"}


def main() -> None:
    copy_pages()
    shutil.rmtree(SITE, ignore_errors=True)
    # It writes a cache beside its configuration.
    shutil.copyfile(CONFIGURATION, BUILD / CONFIGURATION.name)
    run(BUILD, "-m", "zensical", "build", "--clean", "--strict")
    run(
        ROOT,
        *("-W", "error", "-m", "pdoc", "--docformat", "google"),
        *("--output-directory", str(SITE / "python")),
        *("shoal", r"!shoal\..*", "shoal.domain.errors"),
    )
    if faults := [*faults_of(SITE)]:
        sys.exit("\n".join(faults))
    print(f"{len([*SITE.rglob('*.html')])} pages in {SITE.relative_to(ROOT)}")


def run(folder: Path, *arguments: str) -> None:
    """Run Python in a folder; exit if it fails, after what it has printed."""
    if status := subprocess.run([sys.executable, *arguments], cwd=folder).returncode:
        sys.exit(status)


def copy_pages() -> None:
    """Write the pages of the site to ``build/site-pages``."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for source, target in places().items():
        (PAGES / target).parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            text = (ROOT / source).read_text("utf-8")
            (PAGES / target).write_text(with_site_links(text, source), "utf-8")
        else:
            shutil.copyfile(ROOT / source, PAGES / target)


def places() -> dict[str, str]:
    """Return where the site has each file of the repository that is part of it."""
    found = {
        path.relative_to(ROOT).as_posix(): path.relative_to(DOCS).as_posix()
        for path in sorted(DOCS.rglob("*"))
        if path.suffix in (".md", ".css", ".png", ".svg")
    }
    plots = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("bench/**/*.svg")]
    found |= {plot: f"project/{plot}" for plot in plots}
    return found | {page: f"project/{page}" for page in PROJECT}


def with_site_links(text: str, source: str) -> str:
    """Return the text of the page at ``source`` with links as the site needs them."""
    place = places()[source]

    def replaced(link: re.Match[str]) -> str:
        path, mark, anchor = link["to"].partition("#")
        if not path or urlsplit(path).scheme:
            return link[0]
        target = normpath(f"{source}/../{path}")
        if (ROOT / target).is_dir():
            target += "/README.md"
        if (to := places().get(target)) is not None:
            near = relpath(to, start=normpath(f"{place}/.."))
            named = link["text"].strip("`") in (path, Path(path).name)
            text = title_of(target) if named else link["text"]
            return f"{link['image']}[{text}]({near}{mark}{anchor})"
        if not (ROOT / normpath(f"{source}/../{path}")).exists():
            raise SystemExit(f"{source}: {link['to']} does not exist")
        return link["text"]

    return "".join(
        block if code else LINK.sub(replaced, block) for code, block in blocks_of(text)
    )


def blocks_of(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a page, and whether each is a fenced block of code."""
    for index, part in enumerate(
        re.split(r"^( *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    ):
        yield index % 2 == 1, part


def title_of(source: str) -> str:
    """Return the title of a page, which stands for the name of its file."""
    text = (ROOT / source).read_text("utf-8")
    return text.partition("\n")[0].removeprefix("# ")


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and LOADING_RELATIONS & set(found.get("rel", "").split()):
            self.loads.append(found["href"])
        if tag in LOADED and found.get(LOADED[tag]):
            self.loads.append(found[LOADED[tag]])


def faults_of(site: Path) -> Iterator[str]:
    """Yield each link that leads nowhere, and what is loaded from another site."""
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    for path, page in sorted(pages.items()):
        name = path.relative_to(site)
        for loaded in page.loads:
            if urlsplit(loaded).scheme not in ("", "data") or loaded.startswith("//"):
                yield f"{name}: loads {loaded}"
        if name.name == "404.html":  # its links are relative to any page
            continue
        for link in page.links + page.loads:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: {link} does not exist"
            elif (
                to.fragment
                and target in pages
                and unquote(to.fragment) not in pages[target].anchors
            ):
                yield f"{name}: {link} names no heading"


if __name__ == "__main__":
    main()
