"""Rules that map the names of a checkpoint's tensors to a model's parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

NamedTensors = Iterable[tuple[str, "Tensor"]]
LAYER = r"layers\.(?P<layer>\d+)\."
KIND = r"\.(?P<kind>weight|bias)"
_PARTS = {"q": 0, "k": 1, "v": 2, "query": 0, "key": 1, "value": 2} | {"gate": 0, "up": 1, "w1": 0, "w3": 1, "w2": None}
_PARTS |= {"12": 0, "11": 1}  # Nomic's gate and up
_PARTS |= {"b": 0, "a": 1}  # gates of the delta rule
_INDICES = {"layer": re.compile(r"^layers\.(\d+)\."), "expert": re.compile(r"\.experts\.(\d+)\.")}
_GROUP = re.compile(r"\((?:\?:|\?P<(\w+)>|)((?:[^()\\?]|\\.|(?<=\w)\?)*)\)(\??)")  # without groups in it
_MOST_NAMES = 3  # of a tensor in an error
VISION = "vision.tower."  # before the names of parameters that transformers' modules have
_OWN = re.compile(r"(?:heads|vision)\..*")  # parameters whose tensors have their names


def swap_halves(weight: Tensor) -> Tensor:
    """All gates before all ups, from a tensor that has the ups first."""
    return weight.roll(len(weight) // 2, 0)


def linear_weight(weight: Tensor) -> Tensor:
    """(outputs, inputs, width) of a convolution as the weight of a linear layer, see `ConvStemLayer`."""
    return weight.transpose(1, 2).flatten(1)


def taps_first(weight: Tensor) -> Tensor:
    """(channels, 1, width) of a convolution of each channel as (width, channels)."""
    return weight.flatten(1).t()


def unstack_expert(parameter: str, tensor: Tensor) -> Iterator[tuple[int | None, Tensor]]:
    """The projections of one expert of a stacked tensor: their index in the fused weight, and (outputs, inputs) views.

    `tensor`: (inputs, outputs), or a bias (outputs,); outputs of gate and up alternate.
    """
    for part, rows in rows_of_expert(parameter):
        yield part, tensor[..., rows].mT if tensor.dim() == 2 else tensor[rows]


def rows_of_expert(parameter: str) -> Sequence[tuple[int | None, slice]]:
    """The projections of one expert: their index in the fused weight, and their outputs; see `unstack_expert`."""
    if ".gate_up." in parameter:
        return (0, slice(0, None, 2)), (1, slice(1, None, 2))
    return ((None, slice(None)),)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The parameter that a checkpoint's tensor fills.

    Attributes:
        parameter: name of the model's parameter; with `stacked`, "{expert}" stands for the expert's index.
        part: index of the projection within a fused weight; None for all of them.
        stacked: the tensor holds all experts, input before output, and interleaves gate and up (gpt-oss).
        convert: takes the tensor into our order.
    """

    parameter: str
    part: int | None = None
    stacked: bool = False
    convert: Callable[[Tensor], Tensor] | None = None


def _unchanged(tensors: NamedTensors) -> NamedTensors:
    return tensors


@dataclass(frozen=True)
class WeightNames:
    """How an architecture names its tensors.

    Attributes:
        rules: pattern -> parameter. Groups: layer, kind, part (of a fused weight), expert and stacked.
        prefixes: a pattern of the prefix that all names have in some checkpoints.
        ignored: a pattern of tensors that are not needed if the model has no parameter for them.
        gamma_beta: old checkpoints call weight and bias of norms gamma and beta.
        convert: functions that reorder a tensor, by the parameter's name after the layer.
        zero_keys: a pattern of biases of queries, keys and values whose part for keys no checkpoint has: it is 0.
        prepare: splits, joins or folds tensors of a checkpoint before their names are looked up.
    """

    rules: Sequence[tuple[str, str]]
    prefixes: str = r"model\."
    ignored: str = r"(?!)"
    gamma_beta: bool = False
    convert: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    zero_keys: str = r"(?!)"
    prepare: Callable[[NamedTensors], NamedTensors] = _unchanged

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[str], str]]:
        return [(re.compile(pattern), target) for pattern, target in self.rules]

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is not needed."""
        return re.fullmatch(self.ignored, self._bare(name)) is not None

    def target(self, name: str, parameters: Container[str]) -> WeightTarget | None:
        """The parameter that a checkpoint's tensor belongs to; None if the model has none of that name."""
        if _OWN.fullmatch(name):
            return WeightTarget(name) if name in parameters else None
        name = self._bare(name)
        for pattern, target in self._compiled:
            if match := pattern.fullmatch(name):
                groups = match.groupdict()
                inner = target.format_map(groups)
                parameter = (f"layers.{groups['layer']}." if "layer" in groups else "") + inner
                if parameter.replace("{expert}", "0") in parameters:
                    part = _PARTS[groups["part"]] if "part" in groups else None
                    return WeightTarget(parameter, part, "stacked" in groups, self.convert.get(inner))
        return None

    def names_of(self, parameter: str, part: int | None, known: Collection[str]) -> list[str]:
        """How a checkpoint names the tensor of a parameter, or of a part of it, for errors.

        Of all names that the architecture has, those that look most like `known`, the names in the checkpoint.
        """
        indices = {name: match[1] for name, pattern in _INDICES.items() if (match := pattern.search(parameter))}
        names = {name for rule, _ in self._compiled for name in _written(rule.pattern, indices)}
        stacks = [rule for rule, _ in self._compiled if "stacked" in rule.groupindex]
        stacked = any(rule.fullmatch(self._bare(name)) for rule in stacks for name in known)
        stacked = stacked and "expert" in indices
        likeness: dict[str, float] = {}
        for name in names:
            target = self.target(name, {parameter, parameter.replace(f".{indices.get('expert')}.", ".0.")})
            if target is None or part not in (None, target.part) or target.stacked != stacked:
                continue
            nearest = max(known, key=partial(self._likeness, name), default=name)
            value = self._likeness(name, nearest)
            prefix = nearest.removesuffix(self._bare(nearest)) if value else ""
            likeness[f"{prefix}{name}"] = value
        best = max(likeness.values(), default=0.0)
        return sorted(name for name, value in likeness.items() if value == best)[:_MOST_NAMES] or [parameter]

    def _likeness(self, name: str, other: str) -> float:
        return _shared(name, self._bare(other))

    def superseded(self, names: Iterable[str], parameters: Container[str]) -> set[str]:
        """The names of tensors whose parameter another tensor fills, which an earlier rule names.

        Checkpoints keep the biases of masked language models under two names.
        """
        chosen: dict[str, tuple[int, str]] = {}
        dropped = set()
        for name in names:
            if (target := self.target(name, parameters)) is None or target.part is not None:
                continue
            rules = (i for i, (rule, _) in enumerate(self._compiled) if rule.fullmatch(self._bare(name)))
            rank = (next(rules, len(self._compiled)), name)
            first, last = sorted((rank, chosen.get(target.parameter, rank)))
            chosen[target.parameter] = first
            if first[0] != last[0]:
                dropped.add(last[1])
        return dropped

    def _bare(self, name: str) -> str:
        name = re.sub(rf"^(?:{self.prefixes})", "", name)
        if self.gamma_beta:
            name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        return name


def _written(pattern: str, indices: Mapping[str, str]) -> list[str]:
    """The names that a pattern matches. `indices`: of the layer, and of the expert."""
    group = _GROUP.search(pattern)
    if group is None:
        return [re.sub(r"\\(.)", r"\1", choice) for choice in _optional(pattern)]
    before, after = pattern[: group.start()], pattern[group.end() :]
    choices = [indices.get(group[1] or "", choice) for choice in group[2].split("|")] + ([""] if group[3] else [])
    return [name for choice in choices for name in _written(f"{before}{choice}{after}", indices)]


def _optional(pattern: str) -> list[str]:
    """The pattern with and without a character that may be missing."""
    return [re.sub(r"\w\?", "", pattern), re.sub(r"(\w)\?", r"\1", pattern)]


def _shared(name: str, other: str) -> float:
    """The part of a name with which another one begins, too."""
    parts = name.split(".")
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(parts, other.split("."), strict=False))
    return len(list(same)) / len(parts)
