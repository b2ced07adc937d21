"""The registry of model families: those in `families/`, and those of packages outside the tree.

All are imported when the first one is looked up, and not before.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from quire.engine.models.config.bidirectional import as_encoder
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.families.fallback_composites import FALLBACK_COMPOSITE, is_fallback_composite
from quire.engine.models.family import (
    AnyFamily,
    AudioTower,
    Composite,
    Facts,
    FallbackTower,
    Family,
    RawConfig,
    Spec,
    Tower,
    TwoTowers,
)
from quire.engine.models.specs.decoder import DecoderSpec, EncoderSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.tensor_names import VISION, WeightNames

logger = logging.getLogger(__name__)
GROUP = "quire.families"  # of entry points
_FOLDER = "quire.engine.models.families"
_HEAD = r"lm_head\.(?:weight|bias)"
_TABLE = re.compile(r".*\.position_ids")  # which old checkpoints of two encoders have


class Conflict(Exception):
    """Two families have the same name or claim the same model type."""


@dataclass
class Registry:
    """Families by name and by model type.

    Attributes:
        names, types: families by their names, and by the model types that they claim.
        broken: reasons why families of other packages could not be used, by the names of their entry points.
    """

    names: dict[str, AnyFamily] = field(default_factory=dict)
    types: dict[str, AnyFamily] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def add(self, families: Iterable[AnyFamily]) -> None:
        """Add families: all of them, or none.

        Raises:
            Conflict: a name or a model type is taken.
        """
        names, types = dict(self.names), dict(self.types)
        for family in families:
            if family.name in names:
                raise Conflict(f"there is another family of the name {family.name!r}")
            names[family.name] = family
            for kind in family.config_types:
                if kind in types:
                    raise Conflict(f"model type {kind!r} belongs to the family {types[kind].name!r}")
                types[kind] = family
        self.names, self.types = names, types


@cache
def registry() -> Registry:
    """All families. One of another package that cannot be used is logged, and does not affect others."""
    made = Registry()
    for module in pkgutil.iter_modules(importlib.import_module(_FOLDER).__path__, f"{_FOLDER}."):
        made.add(importlib.import_module(module.name).FAMILIES)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add_entry(made, entry)
    return made


def has_outside_families() -> bool:
    """Whether other packages have families, usable or not."""
    return bool(entry_points(group=GROUP))


def _add_entry(made: Registry, entry: EntryPoint) -> None:
    try:
        loaded = entry.load()
        families = [loaded] if isinstance(loaded, Family | Composite | TwoTowers) else list(loaded)
        if not all(isinstance(family, Family | Composite | TwoTowers) for family in families):
            raise TypeError("it must be a Family or a Composite, or TwoTowers, or a list of these")
        _check_published(made, families)
        made.add(families)
    except Exception as error:  # noqa: BLE001 code of another package may raise anything
        reason = str(error) if isinstance(error, Conflict) else f"{type(error).__name__}: {error}"
        made.broken[entry.name] = reason
        logger.error("the model family %s (%s) cannot be used: %s", entry.name, entry.value, reason)


def _check_published(made: Registry, families: Iterable[AnyFamily]) -> None:
    """Raise Conflict for a family of another package that would change configs of a type which is not its own."""
    taken = {*made.types, *(kind for family in made.names.values() for kind in family.published)}
    for family in families:
        for kind in taken & family.published.keys():
            raise Conflict(f"model type {kind!r}, whose configs it changes, belongs to another family")


def family_of(model_type: str) -> AnyFamily | None:
    """The family of a model type: the one that claims it, or that of other models of a kind; None if there is none."""
    family = registry().types.get(model_type)
    return FALLBACK_COMPOSITE if family is None and is_fallback_composite(model_type) else family


def broken_families() -> str:
    """A sentence about the families of other packages that cannot be used, for errors; empty if all can."""
    listed = "; ".join(f"{name}: {reason}" for name, reason in registry().broken.items())
    return f" (families of other packages that cannot be used: {listed})" if listed else ""


def with_known_type(raw: RawConfig) -> RawConfig:
    """The config under the name that transformers has for its model type; the argument itself if that is the same.

    Raises:
        UnsupportedModel: transformers' implementation lacks an option.
    """
    kind = str(raw.get("model_type"))
    for family in registry().names.values():
        if kind in family.published and (known := family.published[kind](raw)) is not raw:
            return known
    return raw


def spec_of(config: Any) -> Spec:
    """The spec of a config whose model type has a family.

    Raises:
        UnsupportedModel: an option is not supported, or a part is of a type that no family claims.
    """
    family = family_of(config.model_type)
    assert family is not None
    if isinstance(family, Composite):
        inner, spec = _language_model(*family.language_model(config))
        return replace(family.spec(config, spec), family=family.name, language_model=inner)
    if isinstance(family, TwoTowers):
        return replace(family.spec(config), family=family.name)
    return _plain_spec(family, config)


def _plain_spec(family: Family[Any], config: Any) -> Spec:
    spec: Spec = family.spec(config)
    if isinstance(spec, DecoderSpec) and family.is_bidirectional(config):
        spec = as_encoder(spec, config)
    return replace(spec, family=family.name)


def _language_model(kind: str, config: Any) -> tuple[str, DecoderSpec]:
    """The name of the family of a language model inside of another model, and its spec."""
    family = family_of(kind)
    if not isinstance(family, Family) or family.kind != "decoder":
        raise UnsupportedModel(f"a language model of type {kind!r} is not supported here")
    spec = _plain_spec(family, config)
    if not isinstance(spec, DecoderSpec) or spec.encoder is not None:
        raise UnsupportedModel(f"this language model of type {kind!r} is not supported inside of another model")
    return family.name, spec


def text_config_of(config: Any) -> Any:
    """The config of the language model in a config; the argument itself unless it is composed of parts."""
    family = family_of(config.model_type)
    return family.language_model(config)[1] if isinstance(family, Composite) else config


def weight_names(spec: Spec, facts: Facts) -> WeightNames:
    """How the checkpoints of a model name their tensors."""
    family = registry().names[spec.family]
    if isinstance(family, Composite):
        assert isinstance(spec, DecoderSpec)
        inner = registry().names[spec.language_model]
        assert isinstance(inner, Family)
        return family.tensors(spec, _names(inner, spec, facts))
    if isinstance(family, TwoTowers):
        return WeightNames(())
    names = _names(family, spec, facts)
    if isinstance(spec, EncoderSpec) and family.kind == "decoder":
        # A decoder that attends in both directions may have been published with the head of a language model.
        return replace(names, ignored=rf"{names.ignored}|{_HEAD}")
    return names


def _names(family: Family[Any], spec: Spec, facts: Facts) -> WeightNames:
    return family.tensors if isinstance(family.tensors, WeightNames) else family.tensors(spec, facts)


def plain_name(spec: Spec, facts: Facts, name: str) -> str | None:
    """The name of a tensor without the parts of a composed model; None if it is not loaded.

    Tensors of the parts that read pictures and audio have the names that they have in transformers' model, behind
    `VISION`.
    """
    family = registry().names[spec.family]
    if isinstance(family, TwoTowers):
        return None if _TABLE.fullmatch(name) else f"{VISION}{name}"
    if not isinstance(family, Composite):
        return name
    if facts.pictures is not None and family.tower is not None:
        readers: list[Tower | FallbackTower | AudioTower] = [family.tower]
        if isinstance(family.tower, Tower) and family.tower.audio is not None and facts.audio is not None:
            readers.append(family.tower.audio)
        for inner in (reader.module_name(name) for reader in readers):
            if inner is not None:
                return f"{VISION}{inner}"
    return family.plain_name(name)


def two_towers_of(spec: DualEncoderSpec) -> TwoTowers:
    """The family of a spec of two encoders."""
    family = registry().names[spec.family]
    assert isinstance(family, TwoTowers)
    return family


def tower_of(spec: Spec) -> Tower | FallbackTower | None:
    """The part of a spec's family that reads pictures."""
    family = registry().names[spec.family]
    return family.tower if isinstance(family, Composite) else None


def has_adapter(spec: Spec) -> bool:
    """Whether models of a spec's family are trained with adapters for requests with audio, and with pictures."""
    family = registry().names[spec.family]
    return isinstance(family, Composite) and family.has_adapter
