"""Three English texts on which formats of weights are compared.

    python -m benchmarks.texts FOLDER
    quire bench accuracy FOLDER/*.txt --run MODEL --run "MODEL --quantization int8"

Prose, which `quire bench accuracy` has without texts; chapters of the reference that Python brings along, which depend
on its version; and two pages of docs/decisions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

_ROOT = Path(__file__).parents[1]
_DECISIONS = ("006-training-quire-nano.md", "043-parallelism.md")
_CHAPTERS = ("objects", "execmodel", "types")


def english_texts() -> dict[str, str]:
    """Return the texts by their names."""
    return {
        "prose": (_ROOT / "quire/app/bench/texts/harbour.txt").read_text(encoding="utf-8"),
        "reference": "\n".join(topics[chapter] for chapter in _CHAPTERS),
        "decisions": "\n".join((_ROOT / "docs/decisions" / name).read_text(encoding="utf-8") for name in _DECISIONS),
    }


def write_texts(folder: Path, most_characters: int | None = None) -> list[Path]:
    """Write the texts, or the beginning of each, to files."""
    paths = []
    for name, text in english_texts().items():
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(text[:most_characters], encoding="utf-8")
    return paths


def main() -> None:
    """Write the texts to files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder)


if __name__ == "__main__":
    main()
