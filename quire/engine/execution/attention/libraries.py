"""Libraries that compute attention over the KV cache in place of Quire's kernels: what they need, and their import."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.engine.models.errors import UnavailableLibrary, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLibrary:
    """What a library supports, and where it is found.

    Attributes:
        module: name by which it is imported.
        functions: what is used of it.
        package: name by which it is installed.
        version: major and minor number of the first version that has these functions with the arguments used.
        head_dims: sizes of heads: a list, or the multiples of a number.
        block_sizes: positions of a block; None: any number.
        alibi: scores may have ALiBi biases.
        dtypes: of queries and of pages.
        workspace: bytes of the device's memory that it takes for intermediate results.
    """

    module: str
    functions: tuple[str, ...]
    package: str
    version: tuple[int, int]
    head_dims: range | tuple[int, ...]
    block_sizes: Collection[int] | None = None
    alibi: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    workspace: int = 0

    @property
    def head_sizes(self) -> str:
        """The sizes of heads in words."""
        if isinstance(self.head_dims, range):
            return f"multiples of {self.head_dims.step} up to {max(self.head_dims)}"
        return f"{', '.join(map(str, self.head_dims[:-1]))} or {self.head_dims[-1]}"


# Also where a package was built for another torch, a library of CUDA is missing, or no compiler of CUDA is found.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)
MIN_CAPABILITY = (8, 0)  # compute capability that both libraries need for bfloat16

# By the value of --attention-backend.
LIBRARIES: Mapping[str, AttentionLibrary] = {
    "flash_attn": AttentionLibrary(
        module="flash_attn",
        functions=("flash_attn_varlen_func", "flash_attn_with_kvcache"),
        package="flash-attn",
        version=(2, 6),  # softcap
        head_dims=range(8, 257, 8),  # heads of other sizes are padded, and so is the whole KV cache, in each call
        block_sizes=(256,),  # multiples of 256 in the library; larger blocks than 256 are not in --block-size
        alibi=True,
    ),
    "flashinfer": AttentionLibrary(
        module="flashinfer",
        functions=("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"),
        package="flashinfer-python",
        version=(0, 2),  # plan and run
        head_dims=(64, 128, 256),  # others are not refused by the library, and some give wrong results
        workspace=384 << 20,  # the 128 MiB of its documentation are too small for graphs of large batches
    ),
}


def load_library(name: str, dtype: torch.dtype) -> Any:
    """Import a library.

    Args:
        name: value of --attention-backend.
        dtype: of queries and pages.

    Raises:
        UnavailableLibrary: it is not installed, or cannot be imported, or is too old.
        UnsupportedModel: it does not compute with `dtype`.
    """
    library = LIBRARIES[name]
    if dtype not in library.dtypes:
        names = " or ".join(str(supported_dtype).removeprefix("torch.") for supported_dtype in library.dtypes)
        raise UnsupportedModel(
            f"--attention-backend {name} needs --dtype {names}, not {str(dtype).removeprefix('torch.')}; "
            "--attention-backend auto is accepted"
        )
    return _imported(name, library)


def check_installed(name: str) -> None:
    """Check that a library can be imported.

    Raises:
        UnavailableLibrary: it is not installed, or cannot be imported, or is too old.
    """
    _imported(name, LIBRARIES[name])


def _imported(name: str, library: AttentionLibrary) -> Any:
    requirement = f"{library.package} {library.version[0]}.{library.version[1]} or later"
    needs = f"--attention-backend {name} needs the package {requirement}"
    try:
        module = importlib.import_module(library.module)
    except _IMPORT_ERRORS as error:
        cause = f"{type(error).__name__}: {error}"
        raise UnavailableLibrary(f"{needs}, which cannot be imported: {cause}") from error
    version = str(getattr(module, "__version__", "of an unknown version"))
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    missing = [function for function in library.functions if not hasattr(module, function)]
    if missing or tuple(numbers) < library.version:
        raise UnavailableLibrary(
            f"{needs}; installed is {version}" + (f", without {' and '.join(missing)}" if missing else "")
        )
    return module
