"""`quire bench accuracy`: compare what models predict for texts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import IO, Any

from tqdm import tqdm

from quire.app.files import check_writable
from quire.app.openai_client import ServerError
from quire.config.command import ConfigError
from quire.config.commands import BenchAccuracy

try:
    from quire.app.bench import report
except ImportError as missing:
    raise ConfigError(f"quire bench needs the package {missing.name}: pip install 'quire[bench]'") from missing
from quire.app.bench.comparison import ScoredText, as_accuracy_table, summarize_run, write_accuracy_plot
from quire.app.bench.scorers import Score, Scorer, TokenizedText, connect_scorer, split_text
from quire.app.bench.server_process import serve_command, started_server

_BUNDLED_TEXT = "harbour.txt"
_FEWEST_TOKENS = 100  # of a text: the perplexity of fewer says more about the text than about the model
_ADDRESS = re.compile(r"at (https?://[^\s\"]+)")
_LAST_LINES = 3  # of a server that ended, in the error


@dataclass(frozen=True, slots=True)
class Run:
    """One of the models that are compared.

    Attributes:
        label: in the results.
        words: arguments of `quire serve`; or the URL of a server, and the name of its model if one is given.
    """

    label: str
    words: Sequence[str]

    @property
    def is_url(self) -> bool:
        """The model is that of a server that runs."""
        return self.words[0].startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of a text that a server reads at once.

    Attributes:
        start: the first of them.
        scored: the first that has not been scored by the window before.
        end: behind the last.
    """

    start: int
    scored: int
    end: int


def run(settings: BenchAccuracy) -> int:
    """Compare the models and print a table; returns the exit status, which is 1 if one of them failed."""
    check_writable(settings, "result")
    report.check_plot(settings, settings.plot)
    if settings.stride >= settings.window:
        raise ConfigError(
            f"quire bench accuracy: --stride is {settings.stride}, but must be below --window, which is "
            f"{settings.window}: the first tokens of a window are the context of those that it scores"
        )
    runs = _runs(settings)
    texts = _texts(settings)
    rows: list[dict[str, Any]] = []
    baseline: Sequence[ScoredText] = ()
    for candidate in runs:
        row: dict[str, Any] = {"run": candidate.label}
        rows.append(row)
        try:
            scored = _score_run(candidate, texts, settings)
        except ServerError as error:
            if len(rows) == 1:
                print(f"quire bench accuracy: {candidate.label}: {error}", file=sys.stderr)
                return 1
            row["error"] = str(error)
            continue
        baseline = baseline or scored
        row |= summarize_run(scored, baseline)
    print(as_accuracy_table(rows))
    _write(settings, rows, list(texts))
    return 1 if any("error" in row for row in rows) else 0


def _write(settings: BenchAccuracy, rows: list[dict[str, Any]], texts: Sequence[str]) -> None:
    if settings.result is not None:
        shown = settings.model_dump(mode="json", exclude={"api_key", "config", "result", "plot", "texts"})
        report.write_json({"texts": texts, "settings": shown, "runs": rows}, settings.result)
    if settings.plot is not None:
        write_accuracy_plot(rows, f"compared with {rows[0]['run']}, {rows[0]['tokens']} tokens", settings.plot)


def _runs(settings: BenchAccuracy) -> list[Run]:
    """Split the runs into words. Their labels are short where they differ then."""
    if not settings.run:
        raise ConfigError(
            "quire bench accuracy: --run is missing: it is a model with flags of `quire serve`, or the URL of a server"
        )
    try:
        words = [shlex.split(text) for text in settings.run]
    except ValueError as error:
        raise ConfigError(f"quire bench accuracy: --run is not a valid shell command line: {error}") from error
    if not all(words):
        raise ConfigError("quire bench accuracy: --run expects a model or a URL, not an empty string")
    short = [" ".join([part[0] if "://" in part[0] else Path(part[0]).name, *part[1:]]) for part in words]
    labels = [name if short.count(name) == 1 else text for name, text in zip(short, settings.run, strict=True)]
    runs = [Run(label, part) for label, part in zip(labels, words, strict=True)]
    for entry in runs:
        if entry.is_url and len(entry.words) > 2:
            raise ConfigError(
                f"quire bench accuracy: --run {entry.label!r}: behind the URL of a server there may be the name of a "
                "model, and nothing else"
            )
    return runs


def _texts(settings: BenchAccuracy) -> dict[str, str]:
    """The texts by their names."""
    if not settings.texts:
        return {_BUNDLED_TEXT: (files("quire.app.bench") / "texts" / _BUNDLED_TEXT).read_text(encoding="utf-8")}
    texts = {}
    for path in map(Path, settings.texts):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # no UTF-8, or a null character in a name
            raise ConfigError(f"quire bench accuracy: TEXTS expects readable files of UTF-8 text: {error}") from error
        texts[path.name if path.name not in texts else str(path)] = text
    return texts


def _score_run(candidate: Run, texts: dict[str, str], settings: BenchAccuracy) -> list[ScoredText]:
    with ExitStack() as stack:
        url, *names = candidate.words if candidate.is_url else [stack.enter_context(_serving(candidate.words))]
        scorer = stack.enter_context(connect_scorer(url, settings.api_key, settings.timeout, *names))
        return _score_texts(scorer, texts, settings, candidate.label)


@contextmanager
def _serving(words: Sequence[str]) -> Iterator[str]:
    """Start a server, and yield its URL.

    Raises:
        ServerError: it ended before it was ready.
    """
    command = serve_command(*words, "--host", "127.0.0.1", "--port", "0")
    with started_server(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        url = _address(process.stderr, lines)
        if url is None:
            raise ServerError(f"`quire serve` ended: {' '.join(' '.join(lines).split())}")
        Thread(target=_read_log, args=(process.stderr, lines), daemon=True).start()  # a full pipe would stop the server
        yield url


def _read_log(log: IO[str], lines: deque[str]) -> None:
    with suppress(ValueError):  # it is closed when the server has ended
        lines.extend(log)


def _address(log: IO[str], lines: deque[str]) -> str | None:
    """Read a server's log until it says where it listens. `lines`: gets what was read."""
    for line in log:
        lines.append(line)
        if match := _ADDRESS.search(line):
            return match[1]
    return None


def _score_texts(scorer: Scorer, texts: dict[str, str], settings: BenchAccuracy, label: str) -> list[ScoredText]:
    if scorer.context is not None and settings.window >= scorer.context:
        raise ServerError(
            f"a window of {settings.window} tokens and one more do not fit into its context of {scorer.context}: "
            f"--window may be {scorer.context - 1}"
        )
    tokenized = {name: _tokenize(scorer, name, text) for name, text in texts.items()}
    plans = {name: _windows(text, settings) for name, text in tokenized.items()}
    with tqdm(total=sum(map(len, plans.values())), desc=label, unit="window") as bar:
        scored = []
        for name, text in tokenized.items():
            scores: list[Score] = []
            for window in plans[name]:
                tokens = [*text.prefix, *text.tokens[window.start : window.end]]
                first = len(text.prefix) + window.scored - window.start
                scores += scorer.score(tokens, first, settings.top_logprobs)
                bar.update()
            first = plans[name][0].scored
            unscored = len(scorer.detokenize(text.tokens[:first]).encode()) if first else 0
            length = len(texts[name].encode()) - unscored
            scored.append(ScoredText(name, text.tokens[first:], scores, length))
    return scored


def _tokenize(scorer: Scorer, name: str, text: str) -> TokenizedText:
    tokenized = split_text(scorer, text) if text else TokenizedText((), ())
    if len(tokenized.tokens) < _FEWEST_TOKENS:
        raise ServerError(
            f"the text {name} is too short: it has {len(tokenized.tokens)} tokens, and a text needs at least "
            f"{_FEWEST_TOKENS}"
        )
    return tokenized


def _windows(text: TokenizedText, settings: BenchAccuracy) -> list[Window]:
    """The windows in which a text is read. Special tokens are in front of each.

    Raises:
        ServerError: they leave no room for context.
    """
    length = settings.window - len(text.prefix)
    if length <= settings.stride:
        raise ServerError(
            f"the {len(text.prefix)} special tokens in front of a window of {settings.window} leave no context to a "
            f"stride of {settings.stride}: choose a smaller --stride"
        )
    scored = 0 if text.prefix else 1  # the very first token has no context
    windows = []
    for start in range(0, len(text.tokens), settings.stride):
        end = min(start + length, len(text.tokens))
        windows.append(Window(start, scored, end))
        scored = end
        if end == len(text.tokens):
            break
    return windows
