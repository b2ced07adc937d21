"""Imports torch in less time: its library is loaded beside other imports, and what few models need is left out."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from typing_extensions import override

# Shapes of results on the meta device, in Python, for tracing: a quarter of torch's own time. Factories, views and
# copies, which are all that Quire's own modules use there, are compiled in.
_META = "torch._meta_registrations"
# What tracing is built on: modules that import each other and the shapes, in a circle that can only begin with these.
_CIRCLE = frozenset({"torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"})
_LIBRARY = "libtorch_cpu.so"


def start_loading_libraries() -> None:
    """Load torch's largest library in a thread: it is dynamic linking, without the interpreter's lock."""
    if "torch" in sys.modules:
        return
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else [Path(place) / "lib" for place in spec.submodule_search_locations or ()]
    for library in (folder / _LIBRARY for folder in folders):
        if library.exists():  # Linux
            threading.Thread(target=_load, args=(library,), name="quire-load", daemon=True).start()


def _load(library: Path) -> None:
    """Open a library. Called as a foreign function, unlike by ctypes.CDLL, dlopen runs without the lock."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    dlopen(os.fsencode(library), os.RTLD_NOW)  # if it fails, torch's own import says why


def import_torch() -> None:
    """Import torch without shapes of results on the meta device, unless it has been imported; see `import_shapes`.

    They are imported when something traces, as torch.compile does.
    """
    if "torch" in sys.modules:
        return
    sys.modules[_META] = empty = ModuleType(_META)
    try:
        torch = importlib.import_module("torch")
    finally:
        del sys.modules[_META]
    if getattr(torch, "_meta_registrations", None) is empty:
        del torch._meta_registrations  # so that importing it imports it
        sys.meta_path.insert(0, _ShapesFirst())


def import_shapes() -> None:
    """Import what `import_torch` has left out, for models of transformers."""
    with suppress(ModuleNotFoundError):  # of another version
        importlib.import_module(_META)


class _ShapesFirst(MetaPathFinder, Loader):
    """Imports the shapes before the first module of their circle, as torch does."""

    def __init__(self) -> None:
        self._has_begun = False

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        return None if self._has_begun or fullname not in _CIRCLE else ModuleSpec(fullname, self)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Not in `find_spec`, during which all imports of other threads wait.
        self._has_begun = True
        import_shapes()
        return importlib.import_module(spec.name)  # by other finders, if the shapes have not

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it has been executed."""
