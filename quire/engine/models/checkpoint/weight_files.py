"""Which files of a folder are weights that can be loaded, and why others are not.

Without torch: a server looks at a model's files before it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of a checkpoint in several files
MODULES = "modules.json"  # of sentence-transformers, whose weights may be in subdirectories
NO_WEIGHTS = "contains no .safetensors files"
# Files that hold weights but no model that can be loaded, and why.
_UNREADABLE = (
    ("consolidated*.safetensors", "is in Mistral's own format; use the checkpoint in Hugging Face's format"),
    ("adapter_*.safetensors", "is an adapter; merge it into the model that it was trained on"),
    ("*.gguf", "is in the GGUF format"),
    *((pattern, "is in PyTorch's pickle format; convert it to safetensors") for pattern in ("*.bin", "*.pt", "*.pth")),
    ("*.ckpt", "is in PyTorch's pickle format; convert it to safetensors"),
    *((pattern, "is of another framework; convert it to safetensors") for pattern in ("*.h5", "*.msgpack", "*.onnx")),
)


def readable_weights(names: Iterable[str]) -> list[str]:
    """The weight files that can be loaded, among the files of a folder."""
    files = [name for name in names if name.endswith(".safetensors")]
    return [name for name in files if not any(fnmatch(name, pattern) for pattern, _ in _UNREADABLE)]


def complaint_about(names: Iterable[str]) -> str:
    """What a folder without such a file contains instead, in words that follow its name."""
    listed = list(names)
    for pattern, reason in _UNREADABLE:
        if unreadable := next((name for name in listed if fnmatch(name, pattern)), None):
            return f"contains no .safetensors files that can be loaded: {unreadable} {reason}"
    return NO_WEIGHTS
