"""The file of API keys: what is accepted, and what is said about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.key_file import KeyFileError, read_key_file
from tests.support.keys import sha256_of

A, B = sha256_of("a"), sha256_of("b")


def test_entries_have_hashes_rights_and_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'# comment\n[alice]\nsha256 = "{A}"\nrequests-per-minute = 60\ntokens_per_minute = 0\n'
        f'["bob@example.com"]\nsha256 = ["{B.upper()}", "{sha256_of("c")}"]\nadmin = true\n'
        "max-concurrent-requests = 2\n"
    )
    entries = read_key_file(path)
    alice, bob = entries["alice"], entries["bob@example.com"]
    assert (alice.requests_per_minute, alice.tokens_per_minute, alice.max_concurrent_requests) == (60, 0, None)
    assert (alice.admin, bob.admin, bob.max_concurrent_requests) == (False, True, 2)
    assert [digest.hex() for digest in bob.digests] == [B, sha256_of("c")]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[alice", "is not a valid TOML file"),
        ("\xff", "is not a valid TOML file"),
        ("a = " + "[" * 5000, "is not a valid TOML file"),
        ("sha256 = 'x'", "'sha256' must be a table"),
        ("[alice]", "sha256 of [alice] expects 64 hexadecimal digits"),
        ("[alice]\nsha256 = 'secret'", "sha256 of [alice] expects 64 hexadecimal digits"),
        (f"[alice]\nsha256 = '{A}0'", "sha256 of [alice] expects"),
        (f"[alice]\nsha256 = '{A}\\n'", "sha256 of [alice] expects"),
        ("[alice]\nsha256 = []", "sha256 of [alice] expects"),
        ("[alice]\nsha256 = 5", "sha256 of [alice] expects"),
        (f"[alice]\nsha256 = '{sha256_of('')}'", "[alice] has the SHA-256 of an empty key"),
        (f"[alice]\nsha256 = '{A}'\nadmin = 1", "admin of [alice] expects true or false"),
        (f"[alice]\nsha256 = '{A}'\nadmin = 'yes'", "admin of [alice] expects true or false"),
        (f"[alice]\nsha256 = '{A}'\nrequests-per-minute = -1", "requests-per-minute of [alice] expects an integer"),
        (f"[alice]\nsha256 = '{A}'\nrequests-per-minute = 1.5", "requests-per-minute of [alice] expects an integer"),
        (f"[alice]\nsha256 = '{A}'\ntokens-per-minute = true", "tokens-per-minute of [alice] expects an integer"),
        (f"[alice]\nsha256 = '{A}'\nkey = 'secret'", "[alice] has no setting 'key'; there are sha256, admin"),
        (f"['a b']\nsha256 = '{A}'", "a name has 1 to 64 letters"),
        (f"['']\nsha256 = '{A}'", "a name has 1 to 64 letters"),
        (f"['{'a' * 65}']\nsha256 = '{A}'", "a name has 1 to 64 letters"),
        (f"['%s']\nsha256 = '{A}'", "a name has 1 to 64 letters"),
        (f'["a\\n"]\nsha256 = "{A}"', "a name has 1 to 64 letters"),
        (f"[a.b]\nsha256 = '{A}'", "sha256 of [a] expects"),
        ("\n".join(f"[k{number}]" for number in range(4097)), "has 4097 tables, but may have 4096"),
        ("#" * (1 << 20) + "\n", "is larger than 1 MiB"),
    ],
)
def test_other_content_is_refused_in_words(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(KeyFileError) as refused:
        read_key_file(path)
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)
    assert len(str(refused.value)) < 1000
