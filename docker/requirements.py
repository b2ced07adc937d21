"""Prints what Quire and its extras need, one requirement a line, as pip reads it: ``requirements.py EXTRA,EXTRA``.

The images install this before Quire itself, in a layer that a new version of Quire leaves as it is.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
requirements = list(project["dependencies"])
for extra in filter(None, sys.argv[1].split(",")):
    requirements += project["optional-dependencies"][extra]
print("\n".join(requirements))
