"""What quire-nano is made of: sizes, phases, the mix of themes, rates."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20_26
PIECES = 3000
SPACED = 900


@dataclass(frozen=True)
class Phase:
    """A stretch of training.

    Attributes:
        until: the step at which it ends; None: the end of the run.
        rates: of the matrices and of the rest.
        batches: batches, each of like lengths, whose gradients make a step.
        mix: shares of the themes among the conversations.
    """

    name: str
    until: int | None
    rates: tuple[float, float]
    batches: int
    mix: dict[str, float]


FIRST = Phase(
    "first", 720, (0.02, 3e-3), 1,
    {"drill": 0.16, "few_tools": 0.28, "tools": 0.04, "recall": 0.14, "extract": 0.14, "quire": 0.09, "talk": 0.05,
     "arithmetic": 0.08, "arithmetic_direct": 0.02, "mixed": 0.0},
)  # fmt: skip
MAIN = Phase(
    "main", 1800, (0.02, 3e-3), 1,
    {"drill": 0.05, "few_tools": 0.15, "tools": 0.19, "recall": 0.17, "extract": 0.13, "quire": 0.10, "talk": 0.06,
     "arithmetic": 0.07, "arithmetic_direct": 0.03, "mixed": 0.05},
)  # fmt: skip
# Copying was what held all themes back after 1,800 steps: pure copies join.
COPY = Phase(
    "copy", 5400, (0.015, 3e-3), 1,
    {"echo": 0.09, "drill": 0.07, "few_tools": 0.12, "tools": 0.17, "recall": 0.16, "extract": 0.13, "quire": 0.08,
     "talk": 0.04, "arithmetic": 0.08, "arithmetic_direct": 0.02, "mixed": 0.04},
)  # fmt: skip
# Sums were learnt slowest: short as they are, they had a fortieth of the tokens.
SUMS = Phase(
    "sums", 5600, (0.015, 3e-3), 1,
    {"echo": 0.06, "drill": 0.06, "few_tools": 0.10, "tools": 0.16, "recall": 0.15, "extract": 0.12, "quire": 0.06,
     "talk": 0.03, "arithmetic": 0.21, "arithmetic_direct": 0.02, "mixed": 0.03},
)  # fmt: skip
# A batch is of one length, so of few themes, and steps of one batch pull to and fro: steps of three are calmer.
CALM = Phase(
    "calm", 6150, (0.012, 1.5e-3), 3,
    {"echo": 0.06, "drill": 0.06, "few_tools": 0.10, "tools": 0.16, "recall": 0.15, "extract": 0.13, "quire": 0.07,
     "talk": 0.03, "arithmetic": 0.19, "arithmetic_direct": 0.02, "mixed": 0.03},
)  # fmt: skip


# Scratch steps were right in form and wrong in every digit: the tables of sums and differences join, many in a row.
TABLES = Phase(
    "tables", 7100, (0.01, 1.2e-3), 3,
    {"table": 0.12, "echo": 0.07, "drill": 0.06, "few_tools": 0.10, "tools": 0.14, "recall": 0.13, "extract": 0.13,
     "quire": 0.08, "talk": 0.03, "arithmetic": 0.14, "arithmetic_direct": 0.01, "mixed": 0.02},
)  # fmt: skip

# From here on the text is composed of parts, not listed: held-out phrasings had failed, not the training's.
PARTS = Phase(
    "parts", 8850, (0.012, 1.5e-3), 3,
    {"table": 0.03, "echo": 0.03, "drill": 0.08, "few_tools": 0.16, "tools": 0.13, "recall": 0.13, "extract": 0.16,
     "quire": 0.12, "talk": 0.04, "arithmetic": 0.11, "arithmetic_direct": 0.005, "mixed": 0.005},
)  # fmt: skip
# Sums had been forgotten; whole scratch steps join the tables.
AGAIN = Phase(
    "again", 9850, (0.012, 1.5e-3), 3,
    {"table": 0.07, "echo": 0.03, "drill": 0.06, "few_tools": 0.12, "tools": 0.09, "recall": 0.11, "extract": 0.16,
     "quire": 0.13, "talk": 0.03, "arithmetic": 0.19, "arithmetic_direct": 0.005, "mixed": 0.005},
)  # fmt: skip
# Without tools the weather is none of its business, and that was all it had learnt: usual tools come more often.
USUAL = Phase(
    "usual", 10_070, (0.006, 8e-4), 3,
    {"table": 0.02, "echo": 0.01, "drill": 0.03, "few_tools": 0.26, "tools": 0.10, "recall": 0.09, "extract": 0.17,
     "quire": 0.14, "talk": 0.05, "arithmetic": 0.13},
)  # fmt: skip
# On a new machine, from the shipped weights: the optimizers' state was gone. Copies join again.
MORE = Phase(
    "more", 10_450, (0.012, 1.5e-3), 3,
    {"table": 0.03, "echo": 0.05, "drill": 0.05, "few_tools": 0.19, "tools": 0.11, "recall": 0.10, "extract": 0.16,
     "quire": 0.14, "talk": 0.04, "arithmetic": 0.125, "mixed": 0.005},
)  # fmt: skip
# Of two tools it chose the right one in half of the cases, even of the training's: of a long prompt one call was
# learnt. Now a prompt has many calls; tools keep their names more often, and more requests were written.
CALLS = Phase(
    "calls", 11_200, (0.012, 1.5e-3), 3,
    {"calls": 0.15, "few_tools": 0.03, "tools": 0.02, "drill": 0.04, "echo": 0.02, "table": 0.02, "recall": 0.09,
     "extract": 0.17, "quire": 0.20, "talk": 0.05, "arithmetic": 0.21},
)  # fmt: skip
# Still chance: 303 tools, each seen 75 times in 750 steps, are too many. The 48 most usual ones make up most now.
KNOWN = Phase(
    "known", 12_100, (0.012, 1.5e-3), 3,
    {"calls": 0.16, "few_tools": 0.04, "tools": 0.02, "drill": 0.02, "echo": 0.02, "table": 0.03, "recall": 0.11,
     "extract": 0.15, "quire": 0.18, "talk": 0.06, "arithmetic": 0.21},
)  # fmt: skip
# Made-up and renamed tools had still been two thirds of the choices; now usual ones under their own names are most.
OWN_NAMES = Phase(
    "own_names", 13_150, (0.012, 1.5e-3), 3,
    {"calls": 0.19, "few_tools": 0.04, "tools": 0.02, "drill": 0.02, "echo": 0.02, "table": 0.03, "recall": 0.10,
     "extract": 0.15, "quire": 0.17, "talk": 0.06, "arithmetic": 0.20},
)  # fmt: skip
# Requests that are none of its business had come to be answered with facts on Quire.
CLOSE = Phase(
    "close", 13_850, (0.012, 1.5e-3), 3,
    {"calls": 0.17, "few_tools": 0.04, "tools": 0.02, "drill": 0.02, "echo": 0.02, "table": 0.03, "recall": 0.12,
     "extract": 0.14, "quire": 0.16, "talk": 0.12, "arithmetic": 0.19},
)  # fmt: skip
# What was still farthest below its bar.
LAST = Phase(
    "last", 14_650, (0.012, 1.5e-3), 3,
    {"calls": 0.18, "few_tools": 0.04, "tools": 0.02, "drill": 0.02, "echo": 0.03, "table": 0.02, "recall": 0.08,
     "extract": 0.22, "quire": 0.14, "talk": 0.12, "arithmetic": 0.18},
)  # fmt: skip
# New names and cities cost ten points of extraction: the lists of words grew tenfold, the texts and requests by half.
UNSEEN = Phase(
    "unseen", 18_700, (0.012, 1.5e-3), 3,
    {"calls": 0.16, "few_tools": 0.02, "tools": 0.01, "drill": 0.02, "echo": 0.04, "table": 0.02, "recall": 0.09,
     "extract": 0.26, "quire": 0.13, "talk": 0.10, "arithmetic": 0.15},
)  # fmt: skip
# Extraction alone was still below its bar. It cost the others two to ten points; the mean of both ends cost nothing.
EXTRACT = Phase(
    "extract", None, (0.008, 1e-3), 3,
    {"calls": 0.10, "echo": 0.02, "table": 0.01, "recall": 0.08, "extract": 0.48, "quire": 0.12, "talk": 0.11,
     "arithmetic": 0.08},
)  # fmt: skip
PHASES = (
    FIRST, MAIN, COPY, SUMS, CALM, TABLES, PARTS, AGAIN, USUAL, MORE, CALLS, KNOWN, OWN_NAMES, CLOSE, LAST, UNSEEN,
    EXTRACT,
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """All that decides the result, besides the word and phrase lists.

    Attributes:
        average_from: the step whose weights the last ones are averaged with.
    """

    seed: int = SEED
    pieces: int = PIECES
    spaced: int = SPACED
    width: int = 256
    layers: int = 6
    heads: int = 4
    inner: int = 704
    steps: int = 19_240
    tokens_per_batch: int = 4096
    weight_decay: float = 0.02
    warmup: int = 100
    decay_share: float = 0.026
    average_from: int | None = 18_700
    phases: tuple[Phase, ...] = PHASES

    def phase_at(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the phase's first step."""
        start = 0
        for phase in self.phases:
            if phase.until is None or step < phase.until:
                return phase, start
            start = phase.until
        raise ValueError("the last phase of a recipe has no end")
