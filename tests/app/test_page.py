"""The built-in page: its files and what protects them."""

from __future__ import annotations

import re
from pathlib import Path

import quire.app.page
from tests.support.server import Server, running_server

_FOLDER = Path(quire.app.page.__file__).parent
_FILES = sorted(path.name for path in _FOLDER.iterdir() if path.suffix in (".css", ".html", ".js", ".svg"))


async def test_the_page_and_its_files_need_no_key_and_no_other_host(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("k",)) as server:
        page = await server.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"unsafe|\*|https?:", policy)
        for name in _FILES:
            answer = await server.http.get(f"/page/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == policy
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        assert (await server.http.get("/page/__init__.py")).status_code == 404
        assert (await server.http.get("/page/..%2f__init__.py")).status_code in (401, 404)
        assert (await server.http.get("/v1/models")).status_code == 401


async def test_every_file_that_the_page_refers_to_is_served(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        page = await server.http.get("/")
        names = [name for name in re.findall(r'(?:href|src)="([^"]+)"', page.text) if not name.startswith("#")]
        assert all(name.startswith("page/") for name in names)
        reached = await _reached(server, [name.removeprefix("page/") for name in names])
        assert reached | {"index.html", "microphone.js"} == set(_FILES)  # the audio thread loads microphone.js


async def _reached(server: Server, names: list[str]) -> set[str]:
    """Return these files and all modules that they import."""
    reached: set[str] = set()
    while names:
        name = names.pop()
        if name not in reached:
            reached.add(name)
            answer = await server.http.get(f"/page/{name}")
            assert answer.status_code == 200, name
            names += re.findall(r'from "\./([^"]+)"', answer.text)
    return reached


async def test_no_file_makes_html_of_text() -> None:
    sinks = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser")
    assert not [name for name in _FILES if sinks.search((_FOLDER / name).read_text(encoding="utf-8"))]


async def test_a_browser_that_has_a_file_gets_it_only_once(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        first = await server.http.get("/page/app.js")
        again = await server.http.get("/page/app.js", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
