"""Figures of models on the same texts, and how far they are from those of the first one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.app.bench.scorers import Score

_SMALLEST = 1e-12  # what is left of a probability of 1, as logarithms need more than 0
_COLUMNS = ("tokens", "perplexity", "bits/byte", "difference", "top-1", "KL at least")


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text under a model.

    Attributes:
        name: of the text.
        tokens: that have scores.
        scores: of these tokens.
        scored_bytes: length of their text in UTF-8.
    """

    name: str
    tokens: Sequence[int]
    scores: Sequence[Score]
    scored_bytes: int


def summarize_run(texts: Sequence[ScoredText], baseline: Sequence[ScoredText]) -> dict[str, Any]:
    """Return the figures of a run. `baseline`: the same texts in the run that it is compared with, or of itself."""
    losses = _losses(texts)
    figures: dict[str, Any] = {
        "tokens": len(losses),
        "perplexity": math.exp(losses.mean()),
        "bits_per_byte": losses.sum() / math.log(2) / sum(text.scored_bytes for text in texts),
        "perplexity_by_text": {text.name: math.exp(_losses([text]).mean()) for text in texts},
    }
    return figures if texts is baseline else figures | _compare(texts, baseline)


def _compare(texts: Sequence[ScoredText], baseline: Sequence[ScoredText]) -> dict[str, Any]:
    if [list(text.tokens) for text in texts] != [list(text.tokens) for text in baseline]:
        return {"not_compared": "its tokenizer splits the texts into other tokens: compare the bits per byte"}
    losses = _losses(texts) - _losses(baseline)
    figures: dict[str, Any] = {
        "difference_percent": 100 * math.expm1(losses.mean()),
        "standard_error_percent": 100 * math.exp(losses.mean()) * float(losses.std(ddof=1)) / math.sqrt(len(losses)),
    }
    pairs = [
        (score.top, before.top)
        for text, other in zip(texts, baseline, strict=True)
        for score, before in zip(text.scores, other.scores, strict=True)
    ]
    if _named_by_text(texts) != _named_by_text(baseline):
        return figures | {"not_compared": "only one of the two servers gives ids of tokens: no agreement of tokens"}
    if not all(top and before for top, before in pairs):
        return figures | {"not_compared": "a server gives no most probable tokens: no agreement of tokens"}
    return figures | {
        "top1_agreement": float(np.mean([_first(top) == _first(before) for top, before in pairs])),
        "kl_lower_bound": float(np.mean([divergence(before, top) for top, before in pairs])),
    }


def divergence(baseline: Mapping[int | str, float], run: Mapping[int | str, float]) -> float:
    """Return a lower bound of the Kullback-Leibler divergence, in nats, from some of the logarithms of both.

    Tokens that one of them lacks are taken together as one, which never makes the divergence larger.
    """
    both = [token for token in baseline if token in run]
    before, after = (np.array([entries[token] for token in both]) for entries in (baseline, run))
    shares = np.exp(before)
    others, others_after = (max(1.0 - float(np.exp(values).sum()), _SMALLEST) for values in (before, after))
    return float((shares * (before - after)).sum()) + others * math.log(others / others_after)


def _losses(texts: Sequence[ScoredText]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([-score.logprob for text in texts for score in text.scores])


def _named_by_text(texts: Sequence[ScoredText]) -> bool:
    return any(isinstance(token, str) for text in texts for score in text.scores for token in score.top)


def _first(top: Mapping[int | str, float]) -> int | str:
    """The most probable token; of several, always the same."""
    return min(top, key=lambda token: (-top[token], token))


def as_accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The figures of all runs for a terminal."""
    cells = [("", *_COLUMNS), *((str(row["run"]), *_cells(row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    ]
    return "\n".join([line.rstrip() for line in lines] + _remarks(rows))


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "perplexity" not in row:
        return ["failed", *([""] * (len(_COLUMNS) - 1))]
    difference = agreement = kl = ""
    if "difference_percent" in row:
        difference = f"{row['difference_percent']:+.2f} ± {row['standard_error_percent']:.2f} %"
    if "top1_agreement" in row:
        agreement, kl = f"{100 * row['top1_agreement']:.1f} %", f"{row['kl_lower_bound']:.5f}"
    return [f"{row['tokens']}", f"{row['perplexity']:.3f}", f"{row['bits_per_byte']:.4f}", difference, agreement, kl]


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    remarks = [f"{row['run']}: {row[field]}" for row in rows for field in ("error", "not_compared") if field in row]
    return ["", *remarks] if remarks else []


def write_accuracy_plot(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Plot the differences of perplexity with their standard errors, the tokens that differ, and the divergences."""
    import matplotlib as mpl  # noqa: PLC0415 slow

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    compared = [row for row in rows if "difference_percent" in row][::-1]
    names = [row["run"] for row in compared]
    nothing = math.nan
    panels = {
        "perplexity, % above the first": [row["difference_percent"] for row in compared],
        "other most probable token, %": [100 * (1 - row.get("top1_agreement", nothing)) for row in compared],
        "KL divergence, at least, nats": [row.get("kl_lower_bound", nothing) for row in compared],
    }
    figure, axes = plt.subplots(
        1, len(panels), figsize=(14, 1.6 + 0.45 * len(compared)), sharey=True, layout="constrained"
    )
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        errors = [row["standard_error_percent"] for row in compared] if axis is axes[0] else None
        axis.barh(names, values, xerr=errors, color="#2a6f97", error_kw={"capsize": 3})
        axis.set(xlabel=name)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.grid(alpha=0.3, axis="x")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
