"""`quire key`: the key that it prints is the one of the entry that it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.app.key import run
from quire.config.command import ConfigError
from quire.config.commands import Key
from quire.config.key_file import read_key_file
from tests.support.keys import sha256_of


def test_entries_can_be_appended_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    keys = []
    for arguments in (["alice"], ["bob@example.com", "--admin", "--requests-per-minute", "0"]):
        assert run(Key.parse(arguments)) == 0
        printed = capsys.readouterr()
        with path.open("a") as file:
            file.write(printed.out)
        keys.append(printed.err.split()[-1])
        assert keys[-1] not in printed.out
    entries = read_key_file(path)
    assert [entry.sha256 for entry in entries.values()] == [[sha256_of(key)] for key in keys]
    assert all(re.fullmatch(r"quire-[\w-]{43}", key) for key in keys)
    assert (entries["alice"].admin, entries["bob@example.com"].admin) == (False, True)
    assert entries["bob@example.com"].requests_per_minute == 0


def test_a_name_is_checked() -> None:
    with pytest.raises(ConfigError, match="a name has 1 to 64 letters"):
        run(Key.parse(["a b"]))
