"""The built-in page: its files and what protects them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.server import running_server


async def test_the_page_and_its_files_need_no_key_and_no_other_host(tmp_path: Path) -> None:
    async with running_server(tmp_path, api_key=("k",)) as server:
        page = await server.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        names = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        assert names
        for name in names:
            assert name.startswith("page/")
        scripts = [await server.http.get(f"/{name}") for name in names]
        imported = ["/page/captions.js", "/page/microphone.js"]
        for answer in (*scripts, *[await server.http.get(path) for path in imported]):
            assert answer.status_code == 200
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
        assert (await server.http.get("/page/__init__.py")).status_code == 404
        assert (await server.http.get("/page/..%2f__init__.py")).status_code in (401, 404)
        assert (await server.http.get("/v1/models")).status_code == 401
