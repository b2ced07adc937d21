"""Summary of a load run as a table, JSON or a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.app.bench.load import LoadResult
from quire.app.files import check_writable, file_error
from quire.config.command import Command
from quire.config.commands import BenchPooling, BenchServe

_PERCENTILES = (50, 90, 95, 99)


def summarize(result: LoadResult, settings: BenchServe, model: str) -> dict[str, Any]:
    """All figures of a run; latencies are in milliseconds."""
    completed = [sample for sample in result.samples if sample.error is None and not sample.aborted]
    errors = [sample.error for sample in result.samples if sample.error is not None]
    output = sum(sample.output_tokens for sample in result.samples)
    prompt = sum(sample.prompt_tokens for sample in completed)
    return {
        "model": model,
        "settings": settings.model_dump(mode="json", exclude={"api_key", "config", "result", "plot"}),
        "seconds": result.seconds,
        "completed": len(completed),
        "aborted": sum(sample.aborted for sample in result.samples),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in completed),
        "output_tokens": output,
        "requests_per_second": len(completed) / result.seconds,
        "output_tokens_per_second": output / result.seconds,
        "total_tokens_per_second": (output + prompt) / result.seconds,
        "ttft_ms": _spread([sample.ttft for sample in completed]),
        "tpot_ms": _spread([sample.tpot for sample in completed if sample.tpot is not None]),
        "itl_ms": _spread([gap for sample in completed for gap in sample.gaps]),
        "e2e_ms": _spread([sample.e2e for sample in completed]),
    }


def summarize_pooling(result: LoadResult, settings: BenchPooling, model: str) -> dict[str, Any]:
    """All figures of a run of embeddings or reranks; latencies are in milliseconds."""
    completed = [sample for sample in result.samples if sample.error is None]
    errors = [sample.error for sample in result.samples if sample.error is not None]
    prompt = sum(sample.prompt_tokens for sample in completed)
    return {
        "model": model,
        "settings": settings.model_dump(mode="json", exclude={"api_key", "config", "result"}),
        "seconds": result.seconds,
        "completed": len(completed),
        "failed": len(errors),
        "errors": sorted(set(errors))[:5],
        "prompt_tokens": prompt,
        "requests_per_second": len(completed) / result.seconds,
        "texts_per_second": len(completed) * settings.batch_size / result.seconds,
        "tokens_per_second": prompt / result.seconds,
        "e2e_ms": _spread([sample.e2e for sample in completed]),
    }


def as_pooling_table(figures: dict[str, Any]) -> str:
    """The figures of embeddings or reranks for a terminal."""
    return "\n".join(
        [
            f"{figures['completed']} completed, {figures['failed']} failed in {figures['seconds']:.1f} s",
            *(f"  error: {error}" for error in figures["errors"]),
            f"{figures['requests_per_second']:.2f} requests/s, {figures['texts_per_second']:.1f} texts/s, "
            f"{figures['tokens_per_second']:.1f} tokens/s",
            *_latencies(figures, ("e2e",)),
        ]
    )


def as_table(figures: dict[str, Any]) -> str:
    """The figures for a terminal."""
    lines = [
        f"{figures['completed']} completed, {figures['aborted']} aborted, {figures['failed']} failed "
        f"in {figures['seconds']:.1f} s",
        *(f"  error: {error}" for error in figures["errors"]),
        f"{figures['requests_per_second']:.2f} requests/s, {figures['output_tokens_per_second']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_second']:.1f} tokens/s in all",
        f"{figures['prompt_tokens']} prompt tokens ({figures['cached_tokens']} cached), "
        f"{figures['output_tokens']} output tokens",
        *_latencies(figures, ("ttft", "tpot", "itl", "e2e")),
    ]
    return "\n".join(lines)


def _latencies(figures: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = ["", f"{'ms':>6} {'mean':>9}" + "".join(f"{f'p{p}':>9}" for p in _PERCENTILES)]
    for name in names:
        spread = figures[f"{name}_ms"]
        if spread:
            values = [spread["mean"], *(spread[f"p{p}"] for p in _PERCENTILES)]
            lines.append(f"{name.upper():>6} " + "".join(f"{value:9.1f}" for value in values))
    return lines


def write_json(figures: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON."""
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def check_plot(settings: Command, path: Path | None) -> None:
    """Refuse a file of --plot that cannot be written, before the benchmark runs.

    Raises:
        ConfigError: it cannot be written, or there are no plots of its format.
    """
    check_writable(settings, "plot")
    if path is not None and path.suffix:
        from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415 slow

        formats = sorted(FigureCanvasBase.get_supported_filetypes())
        if path.suffix[1:].lower() not in formats:
            raise file_error(settings, "plot", "a writable file", f"plots are written as {', '.join(formats)}")


def write_plot(result: LoadResult, title: str, path: Path) -> None:
    """Plot the distributions of TTFT, inter-token latency and end-to-end latency."""
    import matplotlib as mpl  # noqa: PLC0415 as above

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    completed = [sample for sample in result.samples if sample.error is None and not sample.aborted]
    panels = {
        "time to first token": [sample.ttft for sample in completed],
        "between tokens": [gap for sample in completed for gap in sample.gaps],
        "whole request": [sample.e2e for sample in completed],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for axis, (name, seconds) in zip(axes, panels.items(), strict=True):
        if seconds:
            values = np.sort(np.array(seconds)) * 1000
            axis.step(values, np.linspace(0, 100, len(values)), where="post", color="#2a6f97")
        axis.set(title=name, xlabel="ms", ylabel="% of requests" if name != "between tokens" else "% of gaps")
        axis.set_ylim(0, 100)
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.array(seconds) * 1000
    percentiles = np.percentile(values, _PERCENTILES)
    return {"mean": float(values.mean())} | {
        f"p{p}": float(value) for p, value in zip(_PERCENTILES, percentiles, strict=True)
    }
