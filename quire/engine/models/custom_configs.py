"""Configs of models that were published with custom code, and that transformers supports under another name now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.models.errors import UnsupportedModel

_NEEDED = {"layer_norm_type": "layer_norm", "position_embedding_type": "rope", "logn_attention_scale": False}


def with_known_type(raw: dict[str, Any]) -> dict[str, Any]:
    """The config under the name that transformers has for its model type; the argument itself if that is the same.

    Raises:
        UnsupportedModel: an option is not one of those that transformers' implementation has.
    """
    if raw.get("model_type") != "new":
        return raw
    for name, value in _NEEDED.items():
        if raw.get(name, value) != value:
            raise UnsupportedModel(f"{name} {raw[name]!r} is not supported; supported is {value!r}")
    known = {name: value for name, value in raw.items() if name not in ("auto_map", "rope_theta", "rope_scaling")}
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModel(f"rope_scaling must be an object, not {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rope = {**scaling, "rope_type": kind, "rope_theta": raw.get("rope_theta", 10000.0)}
    names = [name.replace("New", "Gte") for name in raw.get("architectures") or []]
    return {**known, "model_type": "gte", "architectures": names, "rope_parameters": rope}
