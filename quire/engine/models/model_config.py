"""ModelConfig: the architecture of a model, read from its folder's config.json.

Read without torch: where torch is installed, transformers' config classes import much of it, which takes two seconds.
A server reads configs in a child process while it imports torch itself (`ConfigReader`).
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from msgspec import structs

from quire.engine.client.audio import AudioInfo
from quire.engine.client.model_info import Generates, ModelKind, Pools
from quire.engine.models.config.checks import check_acts, check_raw, check_spec
from quire.engine.models.config.pooling import PoolingOptions, read_dual_pooler, read_pooler
from quire.engine.models.config.quantization import quantization_section
from quire.engine.models.config.sentence_transformers import read_modules
from quire.engine.models.config.task_adapter import TaskAdapter, read_task_adapter
from quire.engine.models.errors import (
    BrokenFolder,
    ModelError,
    UnknownArchitecture,
    UnsupportedModel,
    UnsupportedOption,
)
from quire.engine.models.families.static import STATIC, static_spec
from quire.engine.models.family import (
    NO_FACTS,
    AnyFamily,
    AudioTower,
    Composite,
    Facts,
    FallbackTower,
    Family,
    Spec,
    Tower,
    TwoTowers,
)
from quire.engine.models.registry import broken_families, family_of, spec_of, text_config_of, with_known_type
from quire.engine.models.sizes import UNKNOWN_SIZES, Sizes, sizes_in_transformers, sizes_of
from quire.engine.models.specs.decoder import CTCSpec, DecoderSpec, EncoderSpec, TransducerSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.pooler import NO_HEADS, HeadReaders, PoolerSpec

logger = logging.getLogger(__name__)
ALONE = "--language-model-only tries its language model alone"  # for errors
ModelImplementation = Literal["auto", "quire", "transformers"]
# Ends of the names of architectures that transformers may run as encoders of text.
_POOLING_NAMES = (
    *("Model", "ForMaskedLM", "ForPreTraining", "SpladeSparseEmbeddingModel"),
    *("ForSequenceClassification", "ForTokenClassification"),
)
_NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})
_NO_POOLING = PoolingOptions()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a model.

    Attributes:
        spec: the architecture; None if transformers' own implementation runs the model.
        facts: what the model does.
        static: folder of a table of embeddings, relative to the model's, that is all of it.
        extra_layers: layers in the checkpoint after the decoder's (multi-token prediction); they are not loaded.
        quantization: how the checkpoint says that its weights are quantized; None: it does not.
        refusal: why Quire's implementation of this architecture does not run the model, so that transformers' is
            tried; None if there is no such reason.
        task_adapter: adapter that is merged into the weights; None: there is none.
        text_only: why a model that reads pictures reads text only; None: it reads them, or was never meant to.
        sizes: those that prompts and results depend on.
    """

    model_type: str
    spec: Spec | None
    extra_layers: int
    quantization: Mapping[str, Any] | None = None
    facts: Facts = NO_FACTS
    static: str | None = None
    refusal: str | None = None
    task_adapter: TaskAdapter | None = None
    text_only: str | None = None
    sizes: Sizes = UNKNOWN_SIZES

    def without_pictures(self, reason: str) -> ModelConfig:
        """The config without the part that reads pictures, if it has one."""
        if self.facts.pictures is None:
            return self
        return replace(self, facts=replace(self.facts, pictures=None), text_only=reason)

    @property
    def unsupported(self) -> str:
        """What Quire's implementation does not support, for errors, where transformers' own runs the model."""
        return self.model_type if self.refusal is None else f"this {self.model_type} ({self.refusal})"

    @property
    def implementation(self) -> Literal["quire", "transformers"]:
        """What runs the model."""
        return "transformers" if self.spec is None else "quire"

    @property
    def reads_prompts_at_once(self) -> bool:
        """Whether one step computes all tokens of a prompt, as they attend to each other in both directions."""
        return isinstance(self.spec, DecoderSpec) and self.spec.prefix_lm

    def context_len(self, requested: int | None) -> int:
        """Return the tokens of the longest sequence; a KV cache may have room for fewer.

        `requested`: --max-model-len. Of a model that pools it is reduced to what there are positions for, as in vLLM.

        Raises:
            UnsupportedModel: it is more than the model has, or the config does not say how much that is.
        """
        trained = self.sizes.longest
        if trained is None:
            raise UnsupportedModel(
                "the model's config.json gives no maximum context length (such as max_position_embeddings)"
            )
        if trained < 1:
            raise UnsupportedModel(
                f"the model's config.json gives a context length of {trained}, but it must be above 0"
            )
        if requested is None or isinstance(self.spec, CTCSpec):
            return trained
        if requested <= trained:
            return requested
        pools = self.facts.pooler is not None and not isinstance(self.spec, DecoderSpec)
        if not pools:
            raise UnsupportedModel(f"--max-model-len is {requested}, but the model supports at most {trained} tokens")
        logger.info("max_model_len is %d, not %d: the model has no positions beyond it", trained, requested)
        return trained

    def within_step(self, context_len: int, requested: int | None, step: int) -> int:
        """Return the context length of a model that pools, if one step computes all tokens of a prompt.

        A model that generates has a longer context: see `Generates.longest_prompt`.

        Args:
            context_len: that of the model.
            requested: --max-model-len.
            step: most tokens of a step.

        Raises:
            UnsupportedModel: more was requested than a step has.
        """
        if self.facts.pooler is None or not self.reads_prompts_at_once or context_len <= step:
            return context_len
        reason = "one step computes all tokens of a prompt, as they attend to each other in both directions"
        if requested is not None:
            raise UnsupportedModel(
                f"--max-model-len {requested} is more than --max-num-batched-tokens {step}: {reason}"
            )
        logger.warning("max_model_len is %d instead of %d: %s (--max-num-batched-tokens)", step, context_len, reason)
        return step

    def kind(self, context_len: int, step: int) -> ModelKind:
        """Return what the model does. An item may be as long as the context: an engine may have room for less.

        Args:
            context_len: tokens of the longest sequence.
            step: most tokens of a step.
        """
        facts, kind = self.facts, self._kind_of_text(context_len, step)
        if facts.pictures is None or not isinstance(kind, Generates | Pools):
            return kind
        info = facts.pictures.info
        if isinstance(self.spec, DecoderSpec):
            size = self.sizes.hidden * (1 + facts.pictures.levels)
            info = structs.replace(info, item_tokens=context_len, embedding_size=size)
        elif isinstance(kind, Pools):
            info = structs.replace(info, embedding_size=kind.embedding_size)
        return structs.replace(kind, pictures=info)

    def _kind_of_text(self, context_len: int, step: int) -> ModelKind:
        """What the model does, apart from pictures."""
        facts = self.facts
        if facts.speech is not None:
            return structs.replace(facts.speech.info, max_output_tokens=context_len)
        if facts.pooler is not None:
            return facts.pooler.facts(self.sizes.hidden, self.sizes.vocab)
        if facts.streaming is not None:
            return facts.streaming
        return Generates(audio=facts.audio, longest_prompt=step if self.reads_prompts_at_once else None)


def read_model_config(
    folder: Path,
    implementation: ModelImplementation = "auto",
    overrides: Mapping[str, Any] = _NO_OVERRIDES,
    pooling: PoolingOptions = _NO_POOLING,
    *,
    language_model_only: bool = False,
) -> ModelConfig:
    """Read the config of a model folder.

    Args:
        folder: the model's directory.
        implementation: value of --model-impl.
        overrides: values that replace those of config.json.
        pooling: settings of a task other than generation.
        language_model_only: a model that reads pictures reads text only.

    Raises:
        BrokenFolder: there is no readable config.
        UnknownArchitecture: transformers does not know the model type, it is neither a causal language model nor one
            that pools, or `implementation` does not support it.
        UnsupportedModel: the checkpoint's quantization or an option of its architecture is not supported, or the model
            cannot do the task.
    """
    config = _read(folder, implementation, overrides, pooling, language_model_only=language_model_only)
    sizes = config.sizes if config.spec is None else sizes_of(config.spec)
    if not isinstance(config.spec, CTCSpec | TransducerSpec | DualEncoderSpec):
        sizes = sizes.with_limit_in(folder)
    return replace(config, sizes=sizes)


def _read(
    folder: Path,
    implementation: ModelImplementation,
    overrides: Mapping[str, Any],
    pooling: PoolingOptions,
    *,
    language_model_only: bool,
) -> ModelConfig:
    """Read a config as `read_model_config` does. Sizes are those of models that transformers runs only."""
    modules = read_modules(folder)
    if modules is not None and modules.static is not None:
        return _static_config(folder, modules.static, overrides, pooling)
    config = read_config(folder, overrides)
    family = family_of(config.model_type)
    if isinstance(family, Family) and family.head:
        return _speech_config(folder, config, family, implementation, pooling)
    if isinstance(family, TwoTowers):
        return _dual_encoder_config(folder, config, family, implementation, pooling)
    names = getattr(config, "architectures", None) or []
    if isinstance(family, Family) and family.kind == "encoder" and any(_is_generator(name) for name in names):
        family = None
    if implementation == "quire" and family is None:
        kind = config.model_type
        raise UnknownArchitecture(f"Quire's decoder does not know model type {kind!r}{broken_families()}")
    spec, refusal = None, None
    if family is not None and implementation != "transformers":
        try:
            spec = _spec(config, family, implementation)
        except UnsupportedModel as error:
            if implementation != "auto" or not _may_run_in_transformers(config, family, pooling):
                raise
            refusal = str(error)
    if spec is not None and family is not None:
        known = _known_config(folder, config, family, spec, pooling)
        tower = family.tower if isinstance(family, Composite) else None
        if tower is None or not isinstance(spec, DecoderSpec) or language_model_only:
            return known
        return _with_pictures(known, folder, config, tower, spec)
    quantization, extra = quantization_section(config, folder), _extra_layers(config)
    if refusal is None and (pooler := _pooler_of_transformers(folder, config, pooling)) is not None:
        sizes = sizes_in_transformers(config)
        return ModelConfig(config.model_type, None, extra, quantization, Facts(pooler=pooler), sizes=sizes)
    if getattr(config, "is_encoder_decoder", False):
        raise UnknownArchitecture(f"{config.model_type} has an encoder, which only Quire's own implementation can run")
    _check_generates(config, pooling)
    sizes = sizes_in_transformers(config)
    return ModelConfig(config.model_type, None, extra, quantization, refusal=refusal, sizes=sizes)


def _known_config(
    folder: Path, config: Any, family: AnyFamily, spec: DecoderSpec | EncoderSpec, pooling: PoolingOptions
) -> ModelConfig:
    """The config of a language model or an encoder of text that Quire runs."""
    kind, extra = config.model_type, _extra_layers(text_config_of(config))
    quantization = quantization_section(config, folder)
    pooler = read_pooler(folder, config, spec, pooling, _heads(config))
    if pooler is None and isinstance(spec, EncoderSpec):
        raise UnsupportedModel(f"{kind} is an encoder, which cannot generate")
    if pooler is None:
        _check_generates(config, pooling)
    if isinstance(family, TwoTowers) or family.facts is None:
        return ModelConfig(
            kind, spec, extra, quantization, Facts(pooler=pooler), task_adapter=read_task_adapter(config)
        )
    if pooler is not None:
        raise UnsupportedModel(f"{kind} models, which read audio, are not supported for embeddings or classification")
    assert isinstance(spec, DecoderSpec)
    return ModelConfig(kind, spec, extra, quantization, family.facts(folder, config, spec))


def _with_pictures(
    known: ModelConfig, folder: Path, config: Any, tower: Tower | FallbackTower, spec: DecoderSpec
) -> ModelConfig:
    """The config with facts about pictures, if Quire supports how the model reads them.

    Raises:
        UnsupportedModel: it does not, and it is not known whether the language model alone can be used.
    """
    is_unknown = isinstance(tower, FallbackTower)
    if is_unknown and known.facts.pooler is not None:
        raise UnsupportedModel(f"models of type {known.model_type!r} are supported for generation only")
    try:
        pictures = tower.facts(folder, config, spec)
    except (BrokenFolder, UnsupportedModel) as error:
        if is_unknown:
            raise UnsupportedModel(f"{error} (model type {known.model_type!r}; {ALONE})") from error
        return replace(known, text_only=str(error))
    facts = replace(known.facts, pictures=pictures)
    if isinstance(tower, Tower) and tower.audio is not None and facts.pooler is None:
        facts = replace(facts, audio=_audio_of_tower(tower.audio, folder, config, spec))
    return replace(known, facts=facts)


def _audio_of_tower(tower: AudioTower, folder: Path, config: Any, spec: DecoderSpec) -> AudioInfo | None:
    """How a model reads audio beside pictures; None: it does not, or not as Quire supports it."""
    try:
        return tower.facts(folder, config, spec)
    except (BrokenFolder, UnsupportedModel) as error:
        logger.warning("%s is loaded without its encoder of audio, and reads no audio: %s", folder.name, error)
        return None


def _spec(config: Any, family: AnyFamily, implementation: ModelImplementation) -> DecoderSpec | EncoderSpec | None:
    """The spec of a config; None for an encoder with an option that only transformers supports."""
    try:
        spec = _built(config)
    except UnsupportedOption as error:
        if implementation == "quire" or not (isinstance(family, Family) and family.kind == "encoder"):
            raise
        logger.info("transformers runs this %s, as Quire does not: %s", config.model_type, error)
        return None
    assert isinstance(spec, DecoderSpec | EncoderSpec)
    return spec


def _heads(config: Any) -> HeadReaders:
    family = family_of(config.model_type)
    return family.heads if isinstance(family, Family) else NO_HEADS


def _pooler_of_transformers(folder: Path, config: Any, pooling: PoolingOptions) -> PoolerSpec | None:
    """How a model pools that transformers runs; None if it generates, or is no encoder of text."""
    names = getattr(config, "architectures", None) or [""]
    asked = pooling.convert != "none" or pooling.task not in ("auto", "generate") or read_modules(folder) is not None
    if any(_is_generator(name) for name in names) and not asked:
        return None
    if not asked and not any(name.endswith(_POOLING_NAMES) for name in names):
        return None
    if getattr(config, "is_encoder_decoder", False) and not any(name.endswith("EncoderModel") for name in names):
        return None
    return read_pooler(folder, config, None, pooling, _heads(config))


def _extra_layers(config: Any) -> int:
    return getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "num_mtp_layers", 0) or 0


def _speech_config(
    folder: Path, config: Any, family: Family[Any], implementation: ModelImplementation, pooling: PoolingOptions
) -> ModelConfig:
    """The config of a model that transcribes with a head of its own."""
    _check_transcribes(config, family.head, implementation, pooling)
    spec = _built(config)
    assert family.facts is not None
    quantization = quantization_section(config, folder)
    return ModelConfig(config.model_type, spec, 0, quantization, family.facts(folder, config, spec))


def _dual_encoder_config(
    folder: Path, config: Any, family: TwoTowers, implementation: ModelImplementation, pooling: PoolingOptions
) -> ModelConfig:
    """The config of an encoder of texts and one of pictures."""
    names = getattr(config, "architectures", None) or []
    if any(not name.endswith("Model") or "Text" in name or "Vision" in name for name in names):
        raise UnknownArchitecture(
            f"{', '.join(names)} is not supported: it must have an encoder of texts and of pictures"
        )
    if implementation == "transformers":
        raise UnknownArchitecture(f"only Quire's own implementation can run {config.model_type}")
    spec = _built(config)
    assert isinstance(spec, DualEncoderSpec)
    pooler = read_dual_pooler(spec, pooling)
    return ModelConfig(
        config.model_type,
        spec,
        0,
        quantization_section(config, folder),
        Facts(pooler=pooler, pictures=family.pictures(folder, config)),
    )


def _check_transcribes(config: Any, head: str, implementation: ModelImplementation, pooling: PoolingOptions) -> None:
    """Check that an encoder of audio has the head with which it transcribes, and is not asked for anything else."""
    names = getattr(config, "architectures", None) or []
    if not any(f"For{head}" in name for name in names):
        architecture = f"the architecture is {', '.join(names)}" if names else "config.json has no `architectures`"
        raise UnknownArchitecture(f"models of type {config.model_type!r} need a head for {head}; {architecture}")
    if implementation == "transformers":
        raise UnknownArchitecture(f"only Quire's own implementation can run {config.model_type}")
    if pooling.task != "auto" or pooling.convert != "none":
        raise UnsupportedModel(
            f"{config.model_type} is supported for transcription only, not for generation or pooling"
        )


def _static_config(folder: Path, inner: str, overrides: Mapping[str, Any], pooling: PoolingOptions) -> ModelConfig:
    """The config of a table of embeddings, which has no config.json that says anything about it."""
    spec = static_spec(folder / inner)
    config = SimpleNamespace(**{"architectures": [], **overrides, "model_type": STATIC})
    pooler = read_pooler(folder, config, spec, pooling, NO_HEADS)
    if pooler is None:
        raise UnsupportedModel("static embeddings cannot generate")
    return ModelConfig(STATIC, spec, 0, None, Facts(pooler=pooler), static=inner)


def _check_generates(config: Any, pooling: PoolingOptions) -> None:
    """Check that a model that transformers runs is a causal language model, which is not asked to pool."""
    names = getattr(config, "architectures", None) or []
    if names and not any(_is_generator(name) for name in names):
        raise UnknownArchitecture(
            f"{', '.join(names)} of model type {config.model_type!r} is not supported: "
            "it is not a causal language model"
        )
    if pooling.task not in ("auto", "generate") or pooling.convert != "none":
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are supported for generation only, not for embeddings"
        )
    if pooling.pooler:
        raise UnsupportedModel("--pooler-config: the model generates; --convert embed makes it pool")


def _may_run_in_transformers(config: Any, family: AnyFamily, pooling: PoolingOptions) -> bool:
    """Whether transformers' implementation may run a model whose config Quire's refuses: a causal language model."""
    reads_audio = isinstance(family, Composite) and family.facts is not None
    is_decoder = isinstance(family, Composite) or (isinstance(family, Family) and family.kind == "decoder")
    if reads_audio or not is_decoder or getattr(config, "is_encoder_decoder", False):
        return False
    try:
        _check_generates(config, pooling)
    except ModelError:
        return False
    return True


def _is_generator(name: str) -> bool:
    return any(kind in name for kind in ("CausalLM", "LMHead", "ConditionalGeneration"))


def _built(config: Any) -> Spec:
    """The spec of a model that Quire knows.

    Raises:
        UnsupportedModel: an option or a number of the config is not supported.
    """
    try:
        spec = spec_of(config)
        check_spec(spec)
        check_acts(spec)
    except ModelError:
        raise
    except Exception as error:  # wrong numbers and values of a wrong type raise many kinds of exceptions
        raise UnsupportedModel(f"the model's config.json cannot be used: {type(error).__name__}: {error}") from error
    return spec


def read_config(folder: Path, overrides: Mapping[str, Any] = _NO_OVERRIDES) -> Any:
    """Read the Hugging Face config of a model folder. `overrides`: values that replace those of config.json.

    Raises:
        BrokenFolder: there is no readable config.
        UnknownArchitecture: transformers does not know the model type.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFolder(f"{path} cannot be read: {error}") from error
    if overrides and isinstance(raw, dict):
        raw = _merged(raw, overrides)
    check_raw(raw, str(path))
    known = with_known_type(raw)
    family = family_of(str(known.get("model_type")))
    is_changed = bool(overrides) or known is not raw
    from transformers import AutoConfig  # noqa: PLC0415 takes most of a second

    try:
        if family is not None and family.config is not None:
            config = family.config(known)
        elif is_changed:
            with tempfile.TemporaryDirectory() as merged:  # reads a folder as it would read the model's
                (Path(merged) / "config.json").write_text(json.dumps(known), encoding="utf-8")
                config = AutoConfig.from_pretrained(merged, local_files_only=True)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers has its own kinds of errors for values of a wrong type
        raise UnknownArchitecture(f"transformers cannot read {path}: {error}{broken_families()}") from error
    return config


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values with overrides. Of an object in both, only the keys that are overridden change."""
    merged = {**values, **overrides}
    for name, value in overrides.items():
        before = values.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            merged[name] = _merged(before, value)
    return merged
