"""Fills a decoder with the weights of a checkpoint, fusing and converting on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from quire.engine.models.decoder import Decoder
from quire.engine.models.errors import WeightMismatch
from quire.engine.models.layers.linear import Linear, Packable
from quire.engine.models.naming import Place, arrange_swapped, place_of
from quire.kernels.linear import Quantization

_NOT_NEEDED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_KEEP_FLOAT32 = re.compile(r".*\.score_bias")
_MOST_NAMES = 5  # in an error message


def allocate(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter of a model built on the meta device memory of its own, and shared ones the same."""
    made: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            keep = _KEEP_FLOAT32.fullmatch(f"{module_name}.{name}") is not None
            if id(parameter) not in made:
                data = torch.empty(parameter.shape, dtype=torch.float32 if keep else dtype)
                made[id(parameter)] = nn.Parameter(data, requires_grad=False)
            setattr(module, name, made[id(parameter)])


class WeightFiller:
    """Takes a checkpoint's weights one by one and knows what is still missing."""

    def __init__(self, model: Decoder, quantization: Quantization = "none", *, extra_layers: int = 0) -> None:
        """`extra_layers`: layers behind the last that the checkpoint may bring and the decoder leaves out."""
        self._quantization = quantization
        self._model = model
        self._extra_layers = extra_layers
        self._parameters = dict(model.named_parameters())  # those that are not complete yet
        self._users = _users(model)
        self._post_norms = any(layer.post_norm for layer in model.spec.layers)
        self._missing = {name: set(self._pieces(name, tensor)) for name, tensor in self._parameters.items()}
        self._experts = {name: len(tensor) for name, tensor in self._parameters.items() if ".experts." in name}
        self._extra: list[str] = []

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights to their places.

        Raises:
            WeightMismatch: one is missing, extra, doubled or of the wrong shape.
        """
        for name, tensor in weights:
            self._put(name, tensor)
        if self._extra:
            raise WeightMismatch(f"the checkpoint has weights that the model does not know: {_some(self._extra)}")
        missing = [name for name, pieces in self._missing.items() if pieces]
        if missing:
            raise WeightMismatch(f"the checkpoint lacks weights: {_some(missing)}")

    def _put(self, name: str, tensor: Tensor) -> None:
        if _NOT_NEEDED.fullmatch(name) or (self._model.spec.tied and name == "lm_head.weight") or self._beyond(name):
            return
        place = place_of(name, self._missing, post_norms=self._post_norms)
        if place is None or (place.expert is not None and place.expert >= self._experts[place.parameter]):
            self._extra.append(name)
            return
        if place.swapped:
            tensor = arrange_swapped(place.parameter, tensor)
        self._tick_off(place, name)
        target = self._target(place)
        if target.shape != tensor.shape:
            raise WeightMismatch(f"{name} has shape {tuple(tensor.shape)}, but the model's is {tuple(target.shape)}")
        target.copy_(tensor)
        if not self._missing[place.parameter]:
            self._complete(place.parameter)

    def _target(self, place: Place) -> Tensor:
        target = self._parameters[place.parameter].data
        if place.expert is not None:
            target = target[place.expert]
        if place.part is None:
            return target
        parts = self._parts(place.parameter)
        return target.narrow(0, sum(parts[: place.part]), parts[place.part])

    def _parts(self, parameter: str) -> tuple[int, ...]:
        owner = self._model.get_submodule(parameter.rpartition(".")[0])
        if isinstance(owner, Linear):
            return owner.parts
        half = self._parameters[parameter].shape[1] // 2  # stacked experts: gate and up
        return (half, half)

    def _pieces(self, name: str, tensor: Tensor) -> Iterable[tuple[int | None, int | None]]:
        """(expert, part) of all pieces in which a parameter may come."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Linear) and len(owner.parts) > 1:
            return [(None, part) for part in range(len(owner.parts))]
        if ".experts." in name and tensor.dim() == 3:
            parts = (0, 1) if name.endswith("gate_up") else (None,)
            return [(expert, part) for expert in range(tensor.shape[0]) for part in parts]
        return [(None, None)]

    def _tick_off(self, place: Place, name: str) -> None:
        missing = self._missing[place.parameter]
        done = {(e, p) for e, p in missing if place.expert in (None, e) and place.part in (None, p)}
        if not done:
            raise WeightMismatch(f"{name} comes twice in the checkpoint")
        missing -= done

    def _complete(self, parameter: str) -> None:
        """Let go of a parameter, so that layers which are complete can lie in another form and its memory be freed."""
        del self._parameters[parameter]
        for layer, parameters in self._users.get(parameter, ()):
            if not any(self._missing[own] for own in parameters):
                layer.pack_weights(self._quantization)

    def _beyond(self, name: str) -> bool:
        match = re.match(r"model\.layers\.(\d+)\.", name)
        return match is not None and 0 <= int(match[1]) - len(self._model.spec.layers) < self._extra_layers


def _users(model: nn.Module) -> dict[str, list[tuple[Packable, list[str]]]]:
    """The layers that use a parameter and wait for it, each with the names of all its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[str, list[tuple[Packable, list[str]]]] = {}
    for layer in model.modules():
        if isinstance(layer, Packable):
            own = [names[id(parameter)] for parameter in layer.parameters(recurse=False)]
            for name in own:
                users.setdefault(name, []).append((layer, own))
    return users


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
