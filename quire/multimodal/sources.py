"""Fetches media by the URLs in messages, within the operator's policy."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import functools
import os
import ssl
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from quire.config.options import MediaOptions
from quire.multimodal.errors import PromptError

_SHOWN = 120  # characters of a URL in an error text
_CHUNK = 1 << 16  # bytes that are read at once


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """The URLs that are allowed. Data URLs always are, others only if configured.

    Attributes:
        domains: host names from which media may be fetched.
        folder: directory from which files may be read; None: no files.
        timeout: seconds that fetching may take.
    """

    domains: frozenset[str] = frozenset()
    folder: Path | None = None
    timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class MediaSource:
    """Where the content of a part comes from.

    Attributes:
        read: fetches or decodes the content.
        memory: bytes that `read` takes at most, with its result.
    """

    read: Callable[[], Awaitable[bytes]]
    memory: int


def media_policy(options: MediaOptions) -> MediaPolicy:
    """The policy from the server's options."""
    domains = frozenset(name.lower() for name in options.allowed_media_domains)
    return MediaPolicy(domains, options.allowed_local_media_path, options.media_fetch_timeout)


def check_url(url: str, policy: MediaPolicy, max_size: int, where: str) -> MediaSource:
    """Check a URL without fetching it.

    Args:
        url: URL of a content part.
        policy: the operator's policy.
        max_size: largest content in bytes.
        where: the content part, for errors.

    Returns:
        The source of the content.

    Raises:
        PromptError: it is not allowed.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return MediaSource(lambda: asyncio.to_thread(_from_data_url, url, max_size, where), 3 * len(url))
    if scheme in ("http", "https"):
        return _checked_address(url, policy, max_size, where)
    if scheme == "file":
        path = _checked_path(url, policy, where)
        return MediaSource(lambda: asyncio.to_thread(_read_file, path, max_size, where), max_size)
    raise PromptError(f"The URL {_shown(url)} must be a data, http, https or file URL.", where)


def base64_source(text: str, max_size: int, where: str) -> MediaSource:
    """The source of content that a text encodes."""
    return MediaSource(lambda: asyncio.to_thread(_decode_base64, text, max_size, where), 2 * len(text))


def _decode_base64(text: str, max_size: int, where: str) -> bytes:
    """The bytes that a text encodes. It may be megabytes long.

    Raises:
        PromptError: it is not base64, empty, or too long.
    """
    if len(text) // 4 * 3 > max_size + 3:
        raise PromptError(f"The content is too large (limit: {max_size} bytes, --max-audio-size).", where)
    try:
        content = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise PromptError(f"The content is not valid base64: {error}.", where) from error
    if not content:
        raise PromptError("The content is empty.", where)
    return content


def _from_data_url(url: str, max_size: int, where: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise PromptError("A data URL must be of the form data:TYPE;base64,CONTENT.", where)
    return _decode_base64(text, max_size, where)


def _checked_address(url: str, policy: MediaPolicy, max_size: int, where: str) -> MediaSource:
    if not policy.domains:
        raise PromptError(
            "This server fetches no URLs: send the content as a data URL, or start the server with "
            "--allowed-media-domains.",
            where,
        )
    try:
        address = httpx.URL(url)  # the parser of the client that fetches it
    except (httpx.InvalidURL, ValueError) as error:
        raise PromptError(f"The URL {_shown(url)} is not valid.", where) from error
    if address.userinfo:
        raise PromptError("URLs with a user name or password are not accepted.", where)
    if address.host.lower() not in policy.domains:
        allowed = ", ".join(sorted(policy.domains))
        raise PromptError(f"The URL must be from one of the allowed domains: {allowed}.", where)
    return MediaSource(lambda: _fetch(address, policy.timeout, max_size, where), 2 * max_size)


async def _fetch(address: httpx.URL, seconds: float, max_size: int, where: str) -> bytes:
    """Fetch an address, without proxies of the environment. Redirects are not followed: they could lead anywhere."""
    certificates = await asyncio.to_thread(_certificates)
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(trust_env=False, verify=certificates, timeout=seconds) as client,
        ):
            headers = {"Accept-Encoding": "identity"}  # a compressed answer could grow without bounds
            async with client.stream("GET", address, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    redirected = "; redirects are not followed" if response.is_redirect else ""
                    raise PromptError(
                        f"The server of the URL returned status {response.status_code}{redirected}.", where
                    )
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise PromptError("The server of the URL returned compressed content.", where)
                return await _collect(response, max_size, where)
    except TimeoutError as error:
        raise PromptError(f"The URL could not be fetched within {seconds:g} s.", where) from error
    except (httpx.HTTPError, OSError, ValueError) as error:
        if isinstance(error, PromptError):
            raise
        # Its text may have addresses of the operator's network.
        raise PromptError("The URL could not be fetched.", where) from error


@functools.cache
def _certificates() -> ssl.SSLContext:
    """CA certificates, read once: that takes tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)


async def _collect(response: httpx.Response, max_size: int, where: str) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_raw(_CHUNK):
        content += chunk
        if len(content) > max_size:
            raise PromptError(
                f"The server of the URL returned too much content (limit: {max_size} bytes, --max-audio-size).", where
            )
    return bytes(content)


def _checked_path(url: str, policy: MediaPolicy, where: str) -> Path:
    if policy.folder is None:
        raise PromptError("This server reads no files: it was started without --allowed-local-media-path.", where)
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path))
        inside = parts.netloc in ("", "localhost") and path.resolve().is_relative_to(policy.folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a path with NUL, or a loop of links
        raise PromptError(f"The URL {_shown(url)} is not valid.", where) from error
    if not inside:
        raise PromptError("The file is not in the directory of --allowed-local-media-path.", where)
    return path.resolve()


def _read_file(path: Path, max_size: int, where: str) -> bytes:
    try:
        # The last component is no link: the path was resolved. Without waiting, if it is a pipe.
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a file")
            content = file.read(max_size + 1)
    except OSError as error:
        raise PromptError("The file cannot be read.", where) from error
    if len(content) > max_size:
        raise PromptError(f"The file is too large (limit: {max_size} bytes, --max-audio-size).", where)
    return content


def _shown(url: str) -> str:
    return repr(url if len(url) <= _SHOWN else f"{url[:_SHOWN]}...")
