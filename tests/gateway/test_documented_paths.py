"""The pages name HTTP operations that exist, and each operation is on a page."""

import re
from collections.abc import Iterator

from harness.documents import PAGES
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.http.operation import Operation

OURS = [
    page
    for page in PAGES
    if not {"decisions", "protocols"} & {*page.parts} and page.name != "ollama.md"
]
"""The pages about this API: others are about those of other programs."""
MENTIONED = re.compile(
    r"`((?:GET|HEAD|POST|PUT|DELETE)(?:`, `[A-Z]+)*) (/[^`?]*)[^`]*`"
)
ANY_SEGMENT = r"\{\w+\}"


def mentioned() -> Iterator[tuple[str, str]]:
    """Yield the method and the path of each operation that a page names."""
    for page in OURS:
        for methods, path in MENTIONED.findall(page.read_text("utf-8")):
            yield from ((method, path) for method in re.findall("[A-Z]+", methods))


def is_named(operation: Operation, method: str, path: str) -> bool:
    """Say whether a page names an operation; parameters may have other names."""
    segments = re.split(ANY_SEGMENT, operation.path)
    pattern = ".+".join(re.escape(each) for each in segments)
    methods = {operation.method} | ({"HEAD"} if operation.method == "GET" else set())
    return method in methods and re.fullmatch(pattern, path) is not None


def test_named_operations_exist() -> None:
    assert not [
        (method, path)
        for method, path in mentioned()
        if not any(is_named(each, method, path) for each in OPERATIONS)
    ]


def test_each_operation_is_on_a_page() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    missing = [
        each.path
        for each in OPERATIONS
        if re.sub(r"/?\{\w+\}.*", "", each.path.removeprefix("/ollama")) not in text
    ]

    assert missing == []
