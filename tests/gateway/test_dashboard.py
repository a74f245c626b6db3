"""The files of the dashboard, as browsers fetch them."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random

import pytest

from gateway.serving import Pool
from shoal.gateway.dashboard import (
    FOLDER,
    GZIP_MIN,
    SECURITY_HEADERS,
    DashboardFile,
    dashboard_files,
    read_files,
)

pytestmark = pytest.mark.shared_pool

TEXT = b"the same text again and again " * 100


@dataclass(frozen=True, slots=True)
class Got:
    status: int
    headers: Mapping[str, str]
    body: bytes


async def get(pool: Pool, path: str, **headers: str) -> Got:
    async with pool.session.get(
        pool.url + path, headers=headers, allow_redirects=False
    ) as response:
        return Got(response.status, response.headers, await response.read())


def test_package_has_the_files() -> None:
    folder = resources.files("shoal") / FOLDER

    assert dashboard_files()["index.html"].body == (folder / "index.html").read_bytes()


async def test_root_is_the_dashboard(pool: Pool) -> None:
    response = await get(pool, "/")

    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.body == dashboard_files()["index.html"].body


async def test_every_answer_has_the_headers_of_security(pool: Pool) -> None:
    tag = (await get(pool, "/")).headers["ETag"]

    for response in (
        await get(pool, "/"),
        await get(pool, "/", **{"If-None-Match": tag}),
        await get(pool, "/dashboard/index.html"),
    ):
        assert SECURITY_HEADERS.items() <= dict(response.headers).items()
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")


async def test_a_browser_asks_again_and_gets_nothing_twice(pool: Pool) -> None:
    first = await get(pool, "/")
    tag = first.headers["ETag"]

    for asked in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await get(pool, "/", **{"If-None-Match": asked})
        assert (again.status, again.body) == (304, b"")
        assert again.headers["ETag"] == tag
    other = await get(pool, "/", **{"If-None-Match": '"other"'})

    assert (first.headers["Cache-Control"], other.status) == ("no-cache", 200)


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.5, *;q=0", True),
        ("deflate , gzip ; q=1", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip;q=0.000, br", False),
        ("x-gzip", False),
    ],
)
async def test_files_are_compressed_if_the_browser_can(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, accepted: str, *, compressed: bool
) -> None:
    file = DashboardFile.of("app.js", TEXT)
    monkeypatch.setattr(
        "shoal.gateway.dashboard.dashboard_files", lambda: {"app.js": file}
    )

    response = await get(pool, "/dashboard/app.js", **{"Accept-Encoding": accepted})

    assert response.body == TEXT  # the client decompresses
    assert ("Content-Encoding" in response.headers) == compressed
    size = len(gzip.compress(TEXT, mtime=0)) if compressed else len(TEXT)
    assert int(response.headers["Content-Length"]) <= size
    assert response.headers["Vary"] == "Accept-Encoding"
    assert response.headers["Content-Type"] == "text/javascript; charset=utf-8"
    tag = response.headers["ETag"]
    again = await get(
        pool,
        "/dashboard/app.js",
        **{"Accept-Encoding": accepted, "If-None-Match": tag},
    )
    assert again.status == 304


def test_what_compression_does_not_make_smaller_stays() -> None:
    assert DashboardFile.of("a.js", b"x" * (GZIP_MIN - 1)).gzipped is None
    assert DashboardFile.of("a.js", Random(1).randbytes(GZIP_MIN)).gzipped is None
    assert DashboardFile.of("a.js", b"x" * GZIP_MIN).gzipped is not None


def test_folders_are_read_with_all_that_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "views" / "deep").mkdir(parents=True)
    (tmp_path / "index.html").write_text("1")
    (tmp_path / "views" / "jobs.js").write_text("2")
    (tmp_path / "views" / "deep" / "LICENSE").write_text("3")

    files = read_files(tmp_path)

    assert {path: file.body for path, file in files.items()} == {
        "index.html": b"1",
        "views/jobs.js": b"2",
        "views/deep/LICENSE": b"3",
    }
    assert files["views/deep/LICENSE"].media == "application/octet-stream"


async def test_head_tells_the_size(pool: Pool) -> None:
    plain = {"Accept-Encoding": "identity"}
    async with pool.session.head(f"{pool.url}/", headers=plain) as response:
        assert response.status == 200
        size = response.headers["Content-Length"]

    assert int(size) == len(dashboard_files()["index.html"].body)


async def test_other_files_are_not_found(pool: Pool) -> None:
    for path in ("none.js", "", "index.html/", "INDEX.HTML", "\x00"):
        response = await get(pool, f"/dashboard/{path}")
        assert response.status == 404, path


async def test_the_dashboard_is_only_read(pool: Pool) -> None:
    for path in ("/", "/dashboard/index.html"):
        async with pool.session.post(pool.url + path) as response:
            assert response.status == 405
