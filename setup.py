"""The compiled kernels, and the resizing of pictures; pyproject.toml, with all else, cannot list files by pattern."""

from glob import glob

from setuptools import Extension, setup

CSRC = "quire/kernels/csrc"
PICTURES = "quire/multimodal/pictures"

setup(
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
