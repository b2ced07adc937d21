"""Tests, and the processes that they start, leave the home folder of the user alone."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

_DEFAULTS = """
from pathlib import Path
from huggingface_hub import constants
from quire.api.responses import store
print(Path.home(), store._default_url().removeprefix("sqlite:///"), constants.HF_HOME, sep="\\n")
"""


def test_processes_of_tests_use_another_home() -> None:
    users_home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    output = subprocess.run([sys.executable, "-c", _DEFAULTS], capture_output=True, text=True, check=True, timeout=100)
    folders = [Path(line) for line in output.stdout.splitlines()]
    assert len(folders) == 3
    assert not [folder for folder in folders if folder.is_relative_to(users_home)]
