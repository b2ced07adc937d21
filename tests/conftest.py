"""Settings that hold for every test."""

from __future__ import annotations

import os

# Before torch or transformers are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
for name in [name for name in os.environ if name.startswith("QUIRE_")]:
    del os.environ[name]
