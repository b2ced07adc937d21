"""API keys: which the server accepts, whose they are, and what they open. Only hashes of them are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from quire.api.http.key_usage import KeyUsage, Limits, UsageRecord
from quire.config.key_file import KeyEntry, KeyFileError, read_key_file
from quire.config.options import ServerOptions

API_KEY = "quire.api_key"  # scope key: the `ApiKey` of an authenticated request


@dataclass(frozen=True, slots=True, eq=False)
class ApiKey:
    """A key that the server accepts; or several of a client, which has them all in one entry of the file.

    Attributes:
        name: for logs and metrics: that of the file's entry, or of the flag with the key's position.
        owner: of what its requests store: a name from which the key cannot be computed.
        is_admin: it opens the endpoints for administrators.
        is_client: its requests are those of one client. False for a single key, which tells nobody apart.
        usage: what its requests use.
    """

    name: str
    owner: str
    is_admin: bool = False
    is_client: bool = True
    usage: KeyUsage = field(default_factory=KeyUsage)


class KeyRing:
    """All keys that the server accepts: those of --api-key and --admin-api-key, and those of --api-key-file.

    Attributes:
        needs_key: the API is closed to requests without a key.
        needs_admin_key: the endpoints for administrators are closed to requests without an admin key. With a file they
            are closed even if it has no admin key: removing the last one must not open them to the others.
    """

    def __init__(
        self, options: ServerOptions, new_record: Callable[[str], UsageRecord | None] = lambda _: None
    ) -> None:
        """Read the keys.

        `new_record`: gives the record of a key's usage by its name, if several processes write it.

        Raises:
            KeyFileError: the file cannot be used, or a key is an API key and an admin key.
        """
        self.needs_key = options.needs_key
        self.needs_admin_key = bool(options.admin_api_key) or options.api_key_file is not None
        self._file = options.api_key_file
        self._new_record = new_record
        self._limits = Limits(options.requests_per_minute, options.tokens_per_minute, options.max_concurrent_requests)
        self._of_flags = self._keys_of_flags(options)
        self._by_digest: Mapping[bytes, ApiKey] = {}
        self._by_name: Mapping[str, ApiKey] = {}
        self.read()

    def read(self) -> None:
        """Read the file again, if there is one. What the requests of a key have used still counts.

        Raises:
            KeyFileError: the file cannot be used; the keys stay as they are.
        """
        by_digest = dict(self._of_flags)
        by_name = {key.name: key for key in by_digest.values()}
        entries = {} if self._file is None else read_key_file(self._file)
        for name, entry in entries.items():
            if name in by_name:
                raise KeyFileError(f"{self._file}: [{name}] has the name of a key that a flag sets")
            key = by_name[name] = self._key_of(name, entry)
            for digest in entry.digests:
                if (other := by_digest.setdefault(digest, key)) is not key:
                    raise KeyFileError(f"{self._file}: [{other.name}] and [{name}] have the same key")
        for name, entry in entries.items():
            by_name[name].usage.set_limits(self._limits_of(entry))
        self._by_digest, self._by_name = by_digest, by_name

    def find(self, sent: bytes) -> ApiKey | None:
        """The key that a client has sent, as it has encoded it; None if the server does not accept it.

        The time that it takes tells nothing about the keys: a SHA-256 is looked up, whose bits nobody can choose.
        """
        return self._by_digest.get(hashlib.sha256(sent).digest()) if sent and self._by_digest else None

    def named(self, name: str | None) -> ApiKey | None:
        """The key with a name; None if there is none."""
        return None if name is None else self._by_name.get(name)

    def _keys_of_flags(self, options: ServerOptions) -> dict[bytes, ApiKey]:
        keys: dict[bytes, ApiKey] = {}
        is_only = len(set(options.api_key)) == 1 and options.api_key_file is None
        for number, text in enumerate(dict.fromkeys(options.api_key), 1):
            name = f"api-key-{number}"
            usage = KeyUsage(self._limits, record=self._new_record(name))
            key = ApiKey(name, _owner(text), is_client=not is_only, usage=usage)
            keys.update((digest, key) for digest in _digests(text))
        for number, text in enumerate(dict.fromkeys(options.admin_api_key), 1):
            key = ApiKey(f"admin-api-key-{number}", _owner(text), is_admin=True)
            if any(digest in keys for digest in _digests(text)):
                raise KeyFileError("a key of --admin-api-key is one of --api-key as well")
            keys.update((digest, key) for digest in _digests(text))
        return keys

    def _key_of(self, name: str, entry: KeyEntry) -> ApiKey:
        before = self._by_name.get(name)
        usage = KeyUsage(record=self._new_record(name)) if before is None else before.usage
        return ApiKey(name, _owner(name, b"quire name"), entry.admin, usage=usage)

    def _limits_of(self, entry: KeyEntry) -> Limits:
        usual = Limits() if entry.admin else self._limits
        return Limits(
            _chosen(entry.requests_per_minute, usual.requests_per_minute),
            _chosen(entry.tokens_per_minute, usual.tokens_per_minute),
            _chosen(entry.max_concurrent_requests, usual.max_concurrent_requests),
        )


def _chosen(limit: int | None, usual: int) -> int:
    return usual if limit is None else limit


def _digests(key: str) -> Iterator[bytes]:
    """SHA-256 of a key as clients encode it: most in UTF-8, some in Latin-1."""
    yield hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # a variable may hold any bytes
    with suppress(UnicodeEncodeError):
        yield hashlib.sha256(key.encode("latin-1")).digest()


def _owner(text: str, kind: bytes = b"quire") -> str:
    """A name for a key, or with another `kind` for the name of an entry, from which it cannot be computed."""
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=24, person=kind).hexdigest()
