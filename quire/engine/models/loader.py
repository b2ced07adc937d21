"""Loads a model folder."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from quire.config.options import ModelOptions
from quire.engine.client.audio import AudioInfo
from quire.engine.client.streaming import Streams
from quire.engine.models.checkpoint.adapter import Adapter, AdapterLoader, without_adapters
from quire.engine.models.checkpoint.checkpoint import Checkpoint, Progress
from quire.engine.models.checkpoint.dummy import DummyCheckpoint
from quire.engine.models.checkpoint.model_cache import ModelCache, model_cache
from quire.engine.models.checkpoint.opened import checkpoint_in, is_gguf
from quire.engine.models.checkpoint.safetensors import SafetensorsFile
from quire.engine.models.checkpoint.weights import EMBEDDING, HEAD, WeightFiller, allocate, check_unpacked
from quire.engine.models.config.checks import check_acts
from quire.engine.models.config.task_adapter import merged
from quire.engine.models.distributed.group import RankGroups
from quire.engine.models.distributed.placement import Placement
from quire.engine.models.errors import BrokenFolder, ModelError, UnsupportedModel, WeightMismatch
from quire.engine.models.family import FallbackTower, PictureFacts
from quire.engine.models.layers.heads import PoolerHeads
from quire.engine.models.layers.linear import Packable
from quire.engine.models.model_config import ModelConfig, read_config
from quire.engine.models.networks.audio_encoder import CTCModel
from quire.engine.models.networks.decoder import Decoder, LanguageModel
from quire.engine.models.networks.dual_encoder import DualEncoder
from quire.engine.models.networks.encoder import Encoder, TextEncoder
from quire.engine.models.networks.transducer import TransducerModel
from quire.engine.models.networks.vision_encoder import PixelEncoder, VisionEncoder
from quire.engine.models.registry import has_adapter, plain_name, tower_of, two_towers_of, weight_names
from quire.engine.models.sharding.cache_scales import CacheScales
from quire.engine.models.sharding.decoder import ShardedDecoder, check_parallel
from quire.engine.models.sharding.shard import with_pictures_of_stages
from quire.engine.models.sharding.weight_shards import WeightShards
from quire.engine.models.sharding.weights import ShardedWeightFiller
from quire.engine.models.specs.decoder import CTCSpec, DecoderSpec, EncoderSpec, TransducerSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.pooler import PoolerSpec
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.engine.models.specs.tensor_names import WeightNames
from quire.kernels import gpu, native

if TYPE_CHECKING:
    from quire.engine.models.fallback.composite import CompositeShell

logger = logging.getLogger(__name__)
ProgressBar = Callable[[int], AbstractContextManager[Progress]]  # given the bytes to come
_EMBEDDINGS = {EMBEDDING, EMBEDDING.removeprefix("model.")}
_ITEM_LORA_ID, _PICTURE_LORA_ID = 0, 1  # of the adapters for requests with audio, and with pictures
_MAX_EXPANSION = 32  # of weights when they are unpacked: from one bit with scales to float32 it is 28


class LoadTarget(Protocol):
    """Facts about a device that loading needs.

    Attributes:
        torch_device: the device on which parameters are allocated.
        quantizable_dtypes: dtypes whose weights the device can quantize while they load.
        computes_bfloat16: bfloat16 arithmetic is faster than float32.
        computes_float16: float16 arithmetic is as fast as bfloat16.
    """

    torch_device: torch.device
    quantizable_dtypes: frozenset[torch.dtype]
    computes_bfloat16: bool
    computes_float16: bool


class LoadObserver(Protocol):
    """Sees a model while it is loaded by Quire's own implementation."""

    def on_allocated(self, model: nn.Module) -> None:
        """Its parameters have been made, and nothing has been read.

        Raises:
            WeightMismatch: the model is not the one that is expected.
        """

    def on_packed(self, path: str, layer: Packable) -> None:
        """The weight of a layer is complete, and packed if it ever is. `path`: of the layer in the model."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the facts that the engine needs of it.

    Attributes:
        config: its config; of a rank, that of its part.
        adapters: its adapters (LoRA), by id.
        item_lora_id: adapter that requests with audio are computed with; None: there is none.
        picture_lora_id: the same of requests with pictures.
    """

    model: LanguageModel | TextEncoder | CTCModel | TransducerModel | DualEncoder
    config: ModelConfig
    dtype: torch.dtype
    context_len: int
    weight_bytes: int
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    item_lora_id: int | None = None
    picture_lora_id: int | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return self.config.sizes.vocab

    @property
    def pooler(self) -> PoolerSpec | None:
        """How the model pools; None if it generates."""
        return self.config.facts.pooler

    @property
    def speech(self) -> SpeechToTextSpec | None:
        """Facts about a model that only transcribes; None for others."""
        return self.config.facts.speech

    @property
    def audio(self) -> AudioInfo | None:
        """Facts about a language model that reads audio; None for others."""
        return self.config.facts.audio

    @property
    def pictures(self) -> PictureFacts | None:
        """Facts about a model that reads pictures; None for others."""
        return self.config.facts.pictures

    @property
    def streaming(self) -> Streams | None:
        """Facts about a model that transcribes audio while it arrives; None for others."""
        return self.config.facts.streaming


@dataclass(frozen=True, slots=True)
class _Load:
    """The loading of one model by Quire's own implementation.

    Attributes:
        shell: what transformers runs around the language model, on the meta device; None: nothing.
        observer: sees the model while it is loaded; None: nothing does.
    """

    folder: Path
    config: ModelConfig
    options: ModelOptions
    checkpoint: Checkpoint
    dtype: torch.dtype
    target: LoadTarget
    bar: ProgressBar
    shell: CompositeShell | None = None
    observer: LoadObserver | None = None

    @property
    def on_packed(self) -> Callable[[str, Packable], None] | None:
        """What is told of packed layers; see `LoadObserver`."""
        return None if self.observer is None else self.observer.on_packed

    def allocate(self, model: nn.Module) -> None:
        """Allocate the parameters of a model on the meta device.

        Raises:
            WeightMismatch: they are too large for the checkpoint.
        """
        needed = sum(parameter.numel() for parameter in model.parameters()) * self.dtype.itemsize
        if needed > _MAX_EXPANSION * self.checkpoint.total_bytes:
            raise WeightMismatch(
                f"config.json describes {needed} bytes of weights, but the checkpoint has {self.checkpoint.total_bytes}"
            )
        allocate(model, self.dtype, self.target.torch_device)
        if self.observer is not None:
            self.observer.on_allocated(model)

    def cache(self, model: nn.Module, *facts: object) -> AbstractContextManager[ModelCache]:
        """The cache of packed weights. `facts`: what beside config and options decides how they are packed."""
        limit = int(self.options.packed_weight_cache_size)
        # Adapters that are merged into weights come from other files, and other devices pack in other ways.
        if self.config.task_adapter is not None or not native.supports(torch.empty(0, dtype=self.dtype)):
            limit = 0
        if self.is_dummy or self.has_exact_inputs or self.target.torch_device.type != "cpu":
            limit = 0
        options = self.options.model_dump_json(exclude={"packed_weight_cache_size"})
        folder = self.folder / (self.config.static or "")
        return model_cache(folder, limit, self.checkpoint.total_bytes, model, str(self.dtype), options, *facts)

    @property
    def has_exact_inputs(self) -> bool:
        """Layers do not round their inputs to int8, as kernels for quantized weights do."""
        return self.options.activation_quantization == "none" and self.target.torch_device.type == "cpu"

    @property
    def is_dummy(self) -> bool:
        """Weights are random."""
        return self.options.load_format == "dummy"

    def fill(self, filler: WeightFiller, tensors: Callable[[Progress], Iterable[tuple[str, Tensor]]]) -> None:
        """Fill a model with the tensors of the checkpoint, of which `tensors` tells the progress, or at random.

        Raises:
            ModelError: they do not fit.
        """
        with self.bar(filler.nbytes if self.is_dummy else self.checkpoint.total_bytes) as progress:
            if self.is_dummy:
                filler.fill_at_random(progress)
            else:
                filler.fill(tensors(progress))

    def loaded(self, model: Decoder | Encoder | CTCModel | TransducerModel | DualEncoder) -> LoadedModel:
        """The model, whose weights are filled, with its facts."""
        context_len = self.config.context_len(self.options.max_model_len)
        return LoadedModel(model.eval(), self.config, self.dtype, context_len, bytes_of(model))


def load_model(
    folder: Path,
    config: ModelConfig,
    options: ModelOptions,
    target: LoadTarget,
    bar: ProgressBar,
    groups: RankGroups | None = None,
    observer: LoadObserver | None = None,
) -> LoadedModel:
    """Load the model in a folder, whose config was read.

    Args:
        folder: the model's directory.
        config: its config.
        options: how it is loaded.
        target: the device.
        bar: is told of the progress.
        groups: those of the rank that loads its part of the model; None: it loads all of it.
        observer: sees the model while it is loaded.

    Raises:
        ModelError: the folder, the architecture or the weights are not supported; the message has the reason.
    """
    try:
        return _load_model(folder, config, options, target, bar, groups, observer)
    except WeightMismatch as error:  # a server may have several models
        raise WeightMismatch(f"{folder.name}: {error}") from error


def _load_model(
    folder: Path,
    config: ModelConfig,
    options: ModelOptions,
    target: LoadTarget,
    bar: ProgressBar,
    groups: RankGroups | None,
    observer: LoadObserver | None,
) -> LoadedModel:
    if groups is not None:
        check_parallel(config)
        config = _with_pictures_of_stage(config, groups.placement)
    quantization = options.online_quantization
    if options.load_format == "dummy" and config.quantization is not None:
        logger.warning("random weights are not in the format %s of the checkpoint", config.quantization["quant_method"])
    quantize = quantization != "none"
    if quantization == "fp8" and not gpu.computes_float8(target.torch_device):
        raise UnsupportedModel(
            "--quantization fp8 needs a GPU of compute capability 8.9 or more; none, int8 and int4 are accepted here"
        )
    if quantize and not target.quantizable_dtypes:
        raise UnsupportedModel(
            "--quantization needs --device cuda, or --device cpu with Quire's compiled kernels (if they are missing, "
            "reinstall Quire with a C++ compiler)"
        )
    shell = _composite_shell(folder, config, options)
    with _open_checkpoint(folder, config, options, shell) as checkpoint:
        dtype = computed_dtype(options, checkpoint, target, exact=config.static is not None)
        if quantize and dtype not in target.quantizable_dtypes:
            names = sorted(str(supported_dtype).removeprefix("torch.") for supported_dtype in target.quantizable_dtypes)
            raise UnsupportedModel(f"--quantization works with --dtype {' or '.join(names)}")
        if quantize and options.activation_quantization == "none":
            _check_exact_inputs(quantization, dtype, target.torch_device)
        load = _Load(folder, config, options, checkpoint, dtype, target, bar, shell, observer)
        if isinstance(config.spec, CTCSpec | TransducerSpec):
            return _load_audio_model(load, config.spec)
        if isinstance(config.spec, DualEncoderSpec):
            return _load_dual_encoder(load, config.spec)
        if config.spec is not None:
            return _load_transformer(load, config.spec, groups)
        if is_gguf(config.quantization):
            raise UnsupportedModel(
                f"models in GGUF files run with Quire's own implementation, which does not support {config.unsupported}"
            )
        if options.load_format == "dummy":
            raise UnsupportedModel(
                "--load-format dummy works with Quire's own implementation only, which does not support "
                f"{config.unsupported}"
            )
        for name in checkpoint.names():
            if name.endswith("weight"):  # masks may be integers
                _check_for_transformers(name, checkpoint.dtype_of(name), config)
        if quantize:
            raise UnsupportedModel(
                f"--quantization works with Quire's own decoder only, which does not support {config.unsupported}"
            )
        if config.facts.pooler is not None:
            return _load_transformers_encoder(load, read_config(folder, options.hf_overrides), config.facts.pooler)
        try:
            return _load_with_transformers(load)
        except ModelError as error:
            if config.refusal is None:
                raise
            reason = f"{config.refusal}; transformers' implementation cannot run it either: {error}"
            raise UnsupportedModel(reason) from error


def _check_for_transformers(name: str, dtype: torch.dtype, config: ModelConfig) -> None:
    """Raise UnsupportedModel for a packed weight of a model that transformers runs."""
    if config.quantization is not None and not dtype.is_floating_point:
        raise UnsupportedModel(
            f"{name} is stored as {str(dtype).removeprefix('torch.')}: weights of quantization method "
            f"{config.quantization['quant_method']!r} are read for Quire's own decoder only, which does not support "
            f"{config.unsupported}"
        )
    check_unpacked(name, dtype)


def open_checkpoint(folder: Path, config: ModelConfig, options: ModelOptions) -> Checkpoint:
    """Open the checkpoint in a folder as `load_model` does.

    Raises:
        ModelError: it cannot be read.
    """
    return _open_checkpoint(folder, config, options, _composite_shell(folder, config, options))


def _open_checkpoint(
    folder: Path, config: ModelConfig, options: ModelOptions, shell: CompositeShell | None
) -> Checkpoint:
    if options.load_format == "dummy":
        return DummyCheckpoint(folder)
    plain: Callable[[str], str | None] = str if config.spec is None else partial(plain_name, config.spec, config.facts)
    if shell is not None:
        plain = shell.renamed(plain)
    return checkpoint_in(folder / (config.static or ""), config.quantization, plain)


def _with_pictures_of_stage(config: ModelConfig, placement: Placement) -> ModelConfig:
    """The config of a rank: each of the first stage has the whole tower, and the other stages do not need it."""
    config = with_pictures_of_stages(config, placement.stages)
    return config if placement.is_first_stage else replace(config, facts=replace(config.facts, pictures=None))


def _load_with_transformers(load: _Load) -> LoadedModel:
    from quire.engine.models.fallback.checks import check_class  # noqa: PLC0415 a second of imports, for few models
    from quire.engine.models.fallback.decoder import load_transformers_model  # noqa: PLC0415 like it

    total, config = load.checkpoint.total_bytes, read_config(load.folder, load.options.hf_overrides)
    check_class(config)
    text = config.get_text_config()
    _check_layers(getattr(text, "num_hidden_layers", 0), load.checkpoint)
    context_len = load.config.context_len(load.options.max_model_len)
    if load.config.refusal is not None:
        logger.warning(
            "Quire's decoder does not support this config (%s): transformers' implementation runs it, which is slower",
            load.config.refusal,
        )
    with load.bar(total) as progress:
        model = load_transformers_model(load.folder, config, load.dtype, load.target.torch_device)
        progress(total)
    return LoadedModel(model, load.config, load.dtype, context_len, total)


def _load_transformers_encoder(load: _Load, hf_config: Any, pooler: PoolerSpec) -> LoadedModel:
    """Load an encoder that transformers runs."""
    from quire.engine.models.fallback.encoder import load_transformers_encoder, position_limit  # noqa: PLC0415

    device, total, dtype = load.target.torch_device, load.checkpoint.total_bytes, load.dtype
    with load.bar(total) as progress:
        try:
            model = load_transformers_encoder(load.folder, hf_config, pooler, dtype, device)
        except UnsupportedModel as error:  # the code of some models mixes dtypes
            if load.options.dtype != "auto" or dtype == torch.float32:
                raise
            logger.warning("%s is computed in float32: %s", load.folder.name, error)
            dtype = torch.float32
            model = load_transformers_encoder(load.folder, hf_config, pooler, dtype, device)
        progress(total)
    heads = nn.ModuleDict({"heads": model.pooler_heads})
    WeightFiller(heads, WeightNames(())).fill(_extra_weights(load.folder, pooler))
    heads.to(device)
    model_config, learned = load.config, position_limit(model)
    if learned is not None:
        model_config = replace(model_config, sizes=replace(model_config.sizes, positions=learned))
    return LoadedModel(model, model_config, dtype, model_config.context_len(load.options.max_model_len), total)


def _load_transformer(load: _Load, spec: DecoderSpec | EncoderSpec, groups: RankGroups | None) -> LoadedModel:
    folder, config, checkpoint, dtype = load.folder, load.config, load.checkpoint, load.dtype
    config.context_len(load.options.max_model_len)  # before weights are read in vain
    check_acts(spec, *(() if config.facts.pooler is None else config.facts.pooler.acts))
    encoder = spec.encoder if isinstance(spec, DecoderSpec) else None
    _check_layers(len(spec.layers) + (0 if encoder is None else len(encoder.layers)), checkpoint)
    if isinstance(spec, DecoderSpec):
        spec = _with_head(spec, checkpoint, config.facts.pooler)
    names = weight_names(spec, config.facts)
    pooler = _with_sparse_head(config.facts.pooler or PoolerSpec(tasks=()), checkpoint, names)
    with torch.device("meta"):
        model = _empty_model(spec, groups, dtype)
        model.heads = PoolerHeads(pooler, spec.hidden, spec.vocab)
    if pooler.sparse_head is not None:
        model.embed.is_exact = True  # the head multiplies with the table
    vision = _vision_encoder(load, spec)
    if vision is not None and isinstance(model, Decoder):
        model.vision = vision
    load.allocate(model)
    if vision is not None:
        vision.make_buffers(load.target.torch_device)
    filler_options: dict[str, Any] = {
        "quantization": checkpoint.requantized(load.options.online_quantization),
        "tied": isinstance(spec, DecoderSpec) and spec.tied,
        "extra_layers": config.extra_layers,
        "read_elsewhere": {HEAD, *_EMBEDDINGS} if pooler.label_tokens else (),
        "embeds_with_head": all(names.target(name, {"embed.weight"}) is None for name in checkpoint.names()),
        "exact_inputs": load.has_exact_inputs,
        "on_packed": load.on_packed,
    }
    filler = (
        ShardedWeightFiller(model, names, WeightShards(model), **filler_options)
        if isinstance(model, ShardedDecoder)
        else WeightFiller(model, names, **filler_options)
    )
    loaders = {} if load.is_dummy else _adapter_loaders(config, names, folder)
    scales = CacheScales(spec) if isinstance(spec, DecoderSpec) else None

    def tensors_of(progress: Progress) -> Iterable[tuple[str, Tensor]]:
        tensors = _tensors(config, names, checkpoint.tensors(dtype, progress, filler), loaders.values())
        if scales is not None:
            tensors = scales.without_scales(tensors)
        if pooler.sparse_head is not None:
            superseded = names.superseded(checkpoint.names(), dict(model.named_parameters()))
            tensors = ((name, tensor) for name, tensor in tensors if name not in superseded)
        extra = _extra_weights(folder, pooler, checkpoint.names())
        return itertools.chain(_with_label_rows(tensors, pooler), extra)

    with load.cache(model, None if groups is None else groups.placement) as cache:
        filler.use_cache(cache)
        load.fill(filler, tensors_of)
    if vision is not None:
        vision.check()
    if scales is not None:
        scales.apply(model)
    loaded = load.loaded(model)
    if not loaders:
        return loaded
    model.num_adapters = max(loaders) + 1
    adapters = {
        lora_id: loader.apply(lora_id, model, dtype, load.target.torch_device) for lora_id, loader in loaders.items()
    }
    return replace(
        loaded,
        weight_bytes=bytes_of(model),
        adapters=adapters,
        item_lora_id=_ITEM_LORA_ID if _ITEM_LORA_ID in adapters else None,
        picture_lora_id=_PICTURE_LORA_ID if _PICTURE_LORA_ID in adapters else None,
    )


def _vision_encoder(load: _Load, spec: DecoderSpec | EncoderSpec) -> VisionEncoder | None:
    """The part of a model that reads pictures, on the meta device; None if it is not loaded."""
    facts, tower = load.config.facts.pictures, tower_of(spec)
    if facts is None or tower is None:
        if load.config.text_only is not None:
            logger.warning(
                "%s is loaded without its vision tower, and reads no pictures: %s",
                load.folder.name,
                load.config.text_only,
            )
        return None
    if isinstance(tower, FallbackTower):
        from quire.engine.models.fallback.composite import FallbackEncoder  # noqa: PLC0415 as below

        assert load.shell is not None
        return FallbackEncoder(load.shell, facts.info.placeholder, facts.samples)
    from quire.engine.models.fallback.tower import empty_tower  # noqa: PLC0415 a second of imports, for few models

    audio = None if load.config.facts.audio is None else tower.audio
    module = empty_tower(read_config(load.folder, load.options.hf_overrides), tower, hears=audio is not None)
    return PixelEncoder(module, tower.encode, facts.normalization, audio, tower.token_embeddings)


def _composite_shell(folder: Path, config: ModelConfig, options: ModelOptions) -> CompositeShell | None:
    """What transformers runs around the language model of a model without a family; None: it has one."""
    if config.spec is None or not isinstance(tower_of(config.spec), FallbackTower):
        return None
    from quire.engine.models.fallback.composite import CompositeShell  # noqa: PLC0415 seconds of imports

    reads_pictures = config.facts.pictures is not None
    return CompositeShell(read_config(folder, options.hf_overrides), reads_pictures=reads_pictures)


def _empty_model(spec: DecoderSpec | EncoderSpec, groups: RankGroups | None, dtype: torch.dtype) -> Decoder | Encoder:
    if isinstance(spec, EncoderSpec):
        return Encoder(spec)
    return Decoder(spec) if groups is None else ShardedDecoder(spec, groups, dtype)


def _tensors(
    config: ModelConfig,
    names: WeightNames,
    tensors: Iterable[tuple[str, Tensor]],
    loaders: Collection[AdapterLoader],
) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a checkpoint as the model has them: without those of adapters, split, joined or folded."""
    if config.task_adapter is not None:
        tensors = merged(tensors, config.task_adapter)
    if loaders:
        tensors = without_adapters(tensors, loaders)
    return names.prepare(tensors)


def _adapter_loaders(config: ModelConfig, names: WeightNames, folder: Path) -> dict[int, AdapterLoader]:
    """The adapters of a model by id, their own files read."""
    facts, loaders = config.facts, dict[int, AdapterLoader]()
    for lora_id, medium, is_read, adapter in (
        (_ITEM_LORA_ID, "audio", facts.audio is not None, facts.adapter),
        (_PICTURE_LORA_ID, "pictures", facts.pictures is not None, facts.picture_adapter),
    ):
        if not is_read:
            continue
        if adapter is not None:
            loaders[lora_id] = AdapterLoader(adapter, names)
            loaders[lora_id].read_file(folder)
        elif config.spec is not None and has_adapter(config.spec):
            logger.warning(
                "%s has no adapter for %s: requests with %s are computed with the same weights as others",
                folder.name,
                medium,
                medium,
            )
    return loaders


def _load_audio_model(load: _Load, spec: CTCSpec | TransducerSpec) -> LoadedModel:
    checkpoint, options, encoder = load.checkpoint, load.options, spec.encoder
    _check_layers(len(encoder.layers), checkpoint)
    with torch.device("meta"):
        model = CTCModel(spec) if isinstance(spec, CTCSpec) else TransducerModel(spec)
    load.allocate(model)
    names = weight_names(spec, load.config.facts)
    filler = WeightFiller(
        model, names, options.online_quantization, exact_inputs=load.has_exact_inputs, on_packed=load.on_packed
    )
    load.fill(filler, lambda progress: names.prepare(checkpoint.tensors(load.dtype, progress)))
    return load.loaded(model)


def _load_dual_encoder(load: _Load, spec: DualEncoderSpec) -> LoadedModel:
    from quire.engine.models.fallback.tower import empty_tower  # noqa: PLC0415 a second of imports, for few models

    checkpoint, options, facts = load.checkpoint, load.options, load.config.facts
    assert facts.pictures is not None
    assert facts.pooler is not None
    if options.online_quantization != "none":
        raise UnsupportedModel(f"--quantization is not supported for {load.config.model_type}")
    _check_layers(spec.layers, checkpoint)
    family = two_towers_of(spec)
    module = empty_tower(read_config(load.folder, options.hf_overrides), None)
    vision = PixelEncoder(module, family.encode_picture, facts.pictures.normalization)
    with torch.device("meta"):
        heads = PoolerHeads(facts.pooler, spec.size, spec.vocab)
    model = DualEncoder(spec, vision, family.encode_texts, heads)
    load.allocate(model)
    vision.make_buffers(load.target.torch_device)
    names = weight_names(spec, facts)
    filler = WeightFiller(model, names, on_packed=load.on_packed)
    load.fill(filler, lambda progress: names.prepare(checkpoint.tensors(load.dtype, progress)))
    return load.loaded(model)


def _check_exact_inputs(quantization: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise UnsupportedModel if weights that are quantized while they load are multiplied with rounded inputs only."""
    if device.type == "cpu" and dtype == torch.float32:
        raise UnsupportedModel(
            "--activation-quantization none works with --dtype bfloat16 on CPUs, if there is a --quantization"
        )
    if device.type != "cpu" and quantization != "int4":
        raise UnsupportedModel(
            f"--quantization {quantization} rounds inputs on GPUs, where --activation-quantization none works with "
            "--quantization int4"
        )


def _with_head(spec: DecoderSpec, checkpoint: Checkpoint, pooler: PoolerSpec | None) -> DecoderSpec:
    """The spec with a head as the checkpoint has it."""
    names = checkpoint.names()
    if pooler is not None and HEAD not in names:
        return replace(spec, tied=True)
    if spec.tied and {EMBEDDING, HEAD} <= names and not checkpoint.equal(EMBEDDING, HEAD):
        logger.warning("tie_word_embeddings is ignored: embedding and LM head of the checkpoint have different weights")
        return replace(spec, tied=False)
    return spec


def _with_sparse_head(pooler: PoolerSpec, checkpoint: Checkpoint, names: WeightNames) -> PoolerSpec:
    """The pooler with a masked language model's head as the checkpoint has it: tied weights may have been trained."""
    head = pooler.sparse_head
    if head is None or not head.tied:
        return pooler
    embedding, table = (
        next((name for name in checkpoint.names() if names.target(name, {parameter}) is not None), None)
        for parameter in ("embed.weight", "heads.sparse_head.table")
    )
    if embedding is None or table is None or checkpoint.equal(embedding, table):
        return pooler
    logger.warning("%s and %s of the checkpoint have different weights: both are used", embedding, table)
    return replace(pooler, sparse_head=replace(head, tied=False))


def _with_label_rows(tensors: Iterable[tuple[str, Tensor]], pooler: PoolerSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and the rows of the output projection that are the weight of a head."""
    rows: Tensor | None = None
    for name, tensor in tensors:
        if pooler.label_tokens and (name == HEAD or (name in _EMBEDDINGS and rows is None)):
            rows = tensor[list(pooler.label_tokens)].clone()
        yield name, tensor
    if rows is not None:
        yield "heads.classify.0.weight", rows


def extra_files(config: ModelConfig) -> Iterator[str]:
    """The weight files beside the checkpoint, relative to the model's folder."""
    facts = config.facts
    for adapter in (facts.adapter, facts.picture_adapter):
        if adapter is not None and adapter.file is not None:
            yield adapter.file
    for _, inner in () if facts.pooler is None else facts.pooler.extra_weights:
        yield f"{inner}/model.safetensors"


def _extra_weights(folder: Path, pooler: PoolerSpec, names: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """The weights of the modules behind the transformer. `names`: of weights that the checkpoint itself has."""
    for step, inner in pooler.extra_weights:
        if f"heads.{step}.weight" in names:
            continue
        path = folder / inner / "model.safetensors"
        if not path.is_file():
            raise BrokenFolder(f"{path} is missing: modules.json names a layer in that directory")
        with SafetensorsFile(path) as file:
            for name in file.names():
                yield f"heads.{step}.{name.removeprefix('linear.')}", file.tensor(name)


def _check_layers(layers: int, checkpoint: Checkpoint) -> None:
    """Raise WeightMismatch for a config with so many layers that building them would take long, for nothing."""
    if layers > checkpoint.num_tensors:
        raise WeightMismatch(
            f"config.json has {layers} layers, but the checkpoint has {checkpoint.num_tensors} tensors"
        )


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's weights, as they are packed."""
    panels = sum(layer.packed_bytes for layer in model.modules() if isinstance(layer, Packable))
    return panels + sum(parameter.nbytes for parameter in model.parameters())


def computed_dtype(options: ModelOptions, checkpoint: Checkpoint, target: LoadTarget, *, exact: bool) -> torch.dtype:
    """The dtype to compute in. `exact`: float32 unless the options say otherwise, since nothing is multiplied."""
    if exact and options.dtype == "auto":
        return torch.float32
    widened = options.dtype == "float16" and not target.computes_float16
    if options.dtype != "auto" and not widened:
        dtype: torch.dtype = getattr(torch, options.dtype)
        return dtype
    stored = checkpoint.dtype()
    # CPUs are a hundred times slower in float16, and half as fast in float32.
    half = stored == torch.float16 and not target.computes_float16
    narrow = half or (stored == torch.float32 and target.computes_bfloat16)
    fast = torch.bfloat16 if narrow else stored
    if widened:
        logger.warning("--dtype float16 is slow on CPUs: %s is used instead", str(fast).removeprefix("torch."))
    return fast
