"""Plots results of `benchmarks.cpu.steps`: tokens a second and share of the memory bandwidth bound, by batch size.

python -m benchmarks.cpu.plots benchmarks/results/STEPS.json ... --out benchmarks/results/PLOT.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl


def plot(reports: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw one line per report and context length."""
    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 after the backend is set

    figure, (speed, share) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    for report in reports:
        for context in sorted({row["context"] for row in report["steps"]}):
            rows = [row for row in report["steps"] if row["context"] == context]
            batches = [row["batch"] for row in rows]
            weights = "bfloat16" if report["quantization"] == "none" else report["quantization"]
            pages = ", int8 pages" if report.get("kv_cache_dtype") == "int8" else ""
            label = f"{report['model']}, {weights}{pages}, context {context:,}"
            speed.plot(batches, [row["tokens_per_s"] for row in rows], marker="o", label=label)
            share.plot(batches, [row["floor_share"] for row in rows], marker="o", label=label)
    for axes, title in ((speed, "decoded tokens per second"), (share, "share of the memory bandwidth bound")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("sequences in the batch")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    speed.set_yscale("log")
    share.set_ylim(0, 1)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=7)
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the reports and write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    plot([json.loads(path.read_text(encoding="utf-8")) for path in options.reports], options.out)


if __name__ == "__main__":
    main()
