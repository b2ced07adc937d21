"""The compiled kernels, and the resizing of pictures; pyproject.toml, with all else, cannot list files by pattern."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = "quire/kernels/csrc"
PICTURES = "quire/multimodal/pictures"


class ParallelBuild(build_ext):
    """Compiles the sources of an extension side by side; setuptools compiles one after the other."""

    def build_extensions(self) -> None:
        """Compile and link all extensions."""
        compile_in_turn = self.compiler.compile

        def compile_each(sources: Sequence[str], **options: Any) -> list[str]:
            # A template is compiled again for each kind of processor, which takes 20 to 80 s a source.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compile and link an extension. After a failure there is none, as an earlier one is not of these sources."""
        try:
            super().build_extension(ext)
        except BaseException:
            for path in (self.get_ext_fullpath(ext.name), self.get_ext_filename(ext.name)):  # the second in the sources
                Path(path).unlink(missing_ok=True)
            raise


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        Extension(
            "quire.kernels._native",
            # Sorted: templates of the standard library are linked from the first file that has them, which must not be
            # one for newer processors than isa_any.cpp.
            sources=sorted(glob(f"{CSRC}/*.cpp")),
            depends=sorted(glob(f"{CSRC}/**/*.h", recursive=True)),
            language="c++",
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-fvisibility=hidden",  # calls within the library need no table
                "-fopenmp",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",  # GCC 12 warns of its own headers for AVX-512
            ],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler it is left out, and the torch references run
        ),
        Extension(
            f"{PICTURES.replace('/', '.')}._resample",
            sources=[f"{PICTURES}/csrc/resample.cpp"],
            depends=sorted(glob(f"{PICTURES}/csrc/*.h")),
            language="c++",
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-Wno-psabi",
                "-Wno-maybe-uninitialized",
            ],
            optional=True,  # without a compiler it is left out, and Pillow resizes
        ),
    ],
)
