"""The part of a composite model of transformers around its language model, which runs as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModelForImageTextToText, GenerationMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_outputs import BaseModelOutputWithPast
from typing_extensions import override

from quire.engine.client.picture_processor import ProcessedPicture
from quire.engine.client.protocol import EncoderInput, PictureItem
from quire.engine.models.errors import UnsupportedModel
from quire.engine.models.model_config import ALONE
from quire.engine.models.networks.vision_encoder import PictureRefused, VisionEncoder

_POSITIONS = "positions that depend on pictures (as M-RoPE)"
_MASKS = "attention masks that depend on pictures (as attention in both directions)"
_TYPES = ("token_type_ids", "mm_token_type_ids")  # arguments of some models: which tokens are those of pictures
_PATCH = 14  # edge of a patch, if the config says nothing
_TEXT = (3, 4, 5)  # tokens around the picture of the trial


class _NoEmbeddings(nn.Module):
    """Embeddings of tokens that are no numbers, so that those that pictures take the place of can be told."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.dtype = torch.float32

    @override
    def forward(self, token_ids: Tensor) -> Tensor:
        return torch.full((*token_ids.shape, self.size), torch.nan, dtype=self.dtype, device=token_ids.device)


class _Recorder(nn.Module):
    """Takes the place of the language model, and keeps what the model around it calls it with."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _NoEmbeddings(config.hidden_size)
        self.call: dict[str, Any] = {}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    @override
    def forward(self, **call: Any) -> BaseModelOutputWithPast:
        self.call = call
        return BaseModelOutputWithPast(last_hidden_state=call["inputs_embeds"])


class CompositeShell:
    """A composite model on the meta device, without its language model.

    Attributes:
        module: transformers' module.
    """

    def __init__(self, config: Any, *, reads_pictures: bool) -> None:
        """Build it.

        Args:
            config: of a checkpoint.
            reads_pictures: False: the language model is loaded alone, and only names of tensors are asked for.

        Raises:
            UnsupportedModel: transformers cannot build it, or it is composed in another way.
        """
        kind = config.model_type
        try:
            with torch.device("meta"):
                whole = AutoModelForImageTextToText.from_config(config)
        except Exception as error:  # of the model's own code, and of packages that it needs
            raise UnsupportedModel(f"transformers cannot build this {kind}: {type(error).__name__}: {error}") from error
        self._prefix = whole.base_model_prefix
        self.module: Any = whole.base_model
        name = next((name for name in ("language_model", "text_model") if hasattr(self.module, name)), None)
        if self.module is whole or self._prefix != "model" or name is None:
            raise UnsupportedModel(f"{kind} models are not supported: their language model has an unusual place")
        _check_generation(whole, kind, reads_pictures=reads_pictures)
        text = getattr(self.module, name)
        if type(text) is not MODEL_MAPPING.get(type(text.config), None):
            raise UnsupportedModel(
                f"{kind} models are not supported: their language model is {type(text).__name__}, not that of "
                f"{text.config.model_type}"
            )
        transforms = get_model_conversion_mapping(whole)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._state = whole.state_dict()
        self._text_prefix = f"{self._prefix}.{name}."
        recorder = _Recorder(text.config)
        setattr(self.module, name, recorder)
        self.module.get_input_embeddings = recorder.get_input_embeddings
        self.recorder = recorder
        if reads_pictures:
            self._check_buffers(kind)
        self.module.eval()

    def renamed(self, plain: Callable[[str], str | None]) -> Callable[[str], str | None]:
        """The function of names of tensors, for names that a checkpoint has, which may be old ones."""
        return lambda name: plain(self.current_name(name))

    def current_name(self, name: str) -> str:
        """The name that transformers' model has for a tensor of a checkpoint, which may be an old one.

        Raises:
            UnsupportedModel: the tensor is divided or joined, outside of the language model.
        """
        renamed: str = rename_source_key(name, self._renamings, [], self._prefix, self._state)[0]
        changed = any(converter.rename_source_key(renamed)[1] is not None for converter in self._converters)
        if changed and not renamed.startswith(self._text_prefix) and renamed not in self._state:
            raise UnsupportedModel(f"{name} of the checkpoint is divided or joined, which is not supported here")
        return renamed

    def _check_buffers(self, kind: str) -> None:
        parameters = {name for name, _ in self.module.named_parameters()}
        buffers = sorted(name for name in self.module.state_dict() if name not in parameters)
        if buffers:
            raise UnsupportedModel(
                f"{kind} models are not supported: {buffers[0]} is read from checkpoints, and is no parameter"
            )


def _check_generation(whole: Any, kind: str, *, reads_pictures: bool) -> None:
    """Refuse models that make positions or masks for their language model before they are called.

    Of text, positions are the usual ones; masks may differ for text as well.
    """
    has_positions = (
        type(whole)._prepare_position_ids_for_generation is not GenerationMixin._prepare_position_ids_for_generation
    )
    if reads_pictures and has_positions:
        raise UnsupportedModel(f"{kind} models have {_POSITIONS}, which only a family can give")
    if hasattr(whole, "create_masks_for_generate"):
        raise UnsupportedModel(f"{kind} models have {_MASKS}, which only a family can give")


class FallbackEncoder(VisionEncoder):
    """Encodes what transformers' processor makes of a picture, with the model around the language model.

    The model runs with the tokens of the picture, and a recorder in the place of its language model: what it puts in
    the place of the tokens' embeddings is the encoding.
    """

    def __init__(self, parts: CompositeShell, placeholder: int, samples: Sequence[ProcessedPicture]) -> None:
        """Make the encoder.

        Args:
            parts: the model.
            placeholder: the token that stands for each embedding.
            samples: pictures that the processor has prepared: a small one, which `check` encodes, and one that takes
                about as much memory as any.
        """
        super().__init__(parts.module)
        self._recorder = (parts.recorder,)  # in a tuple: it is a module of the model
        self._placeholder = placeholder
        self._sample_picture = samples[0]
        self._types = set(_TYPES) & set(inspect.signature(parts.module.forward).parameters)
        self.largest = _item(samples[-1], placeholder)

    @property
    @override
    def patch_area(self) -> int:
        size = getattr(self.tower.config.vision_config, "patch_size", _PATCH)
        return size**2 if isinstance(size, int) else _PATCH**2

    @override
    def _encoded(self, item: PictureItem) -> Tensor:
        (recorder,) = self._recorder
        sample = next(self.tower.parameters())
        stand_in = sample.new_zeros(item.embeddings, recorder.embed_tokens.size)
        try:
            call = self._called([self._placeholder] * item.embeddings, item.inputs)
            _check_arguments(call)
        except Exception as error:  # of the model's own code, also for arrays that do not fit to the tokens
            raise PictureRefused(f"{type(error).__name__}: {str(error)[:300]}", stand_in) from error
        embeddings: Tensor = call["inputs_embeds"][0]
        if embeddings.shape != stand_in.shape or not embeddings.isfinite().all():  # NaN where nothing was put
            raise PictureRefused("the model makes no finite numbers of it, or not for all of its tokens", stand_in)
        return embeddings

    @override
    def check(self) -> None:
        """Check that embeddings in the place of placeholder tokens are all that the language model gets of pictures."""
        try:
            self._check_sample()
        except UnsupportedModel as error:
            kind = self.tower.config.model_type
            raise UnsupportedModel(f"models of type {kind!r} are not supported: {error} ({ALONE})") from error

    @torch.inference_mode()
    def _check_sample(self) -> None:
        """Encode a picture with text around it.

        Raises:
            UnsupportedModel: transformers cannot do it, or the model does what only a family can do.
        """
        item = _item(self._sample_picture, self._placeholder)
        picture = [int(token) for token in self._sample_picture.token_ids]
        text = [token for token in _TEXT if token != self._placeholder]
        tokens = [*text, *picture, *text]
        try:
            texts = self._called(text, ())
            call = self._called(tokens, item.inputs)
        except UnsupportedModel:
            raise
        except Exception as error:  # of the model's own code
            raise UnsupportedModel(
                f"transformers cannot encode a picture: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        for arguments in (texts, call):
            _check_arguments(arguments)
        embeddings = call["inputs_embeds"][0]
        places = torch.tensor(tokens, device=embeddings.device) == self._placeholder
        if not embeddings[places].isfinite().all() or not embeddings[~places].isnan().all():
            raise UnsupportedModel("it changes the embeddings of other tokens than image_token_id, or not all of these")
        try:
            alone = self.encode(item)
        except PictureRefused as error:
            raise UnsupportedModel(f"transformers cannot encode a picture without text: {error}") from error
        if not torch.equal(embeddings[places], alone):
            raise UnsupportedModel("it encodes a picture differently with text around it")

    def _called(self, tokens: Sequence[int], inputs: Sequence[EncoderInput]) -> dict[str, Any]:
        """The arguments with which the model calls its language model."""
        sample = next(self.tower.parameters())
        (recorder,) = self._recorder
        recorder.embed_tokens.dtype = sample.dtype
        arguments = {part.name: _tensor(part.values, sample) for part in inputs}
        token_ids = torch.tensor([tokens], device=sample.device)
        arguments |= dict.fromkeys(self._types, (token_ids == self._placeholder).long())
        recorder.call = {}
        output = self.tower(input_ids=token_ids, use_cache=False, **arguments)
        call, recorder.call = recorder.call, {}
        if output[0] is not call.get("inputs_embeds"):
            raise UnsupportedModel("it changes what its language model computes")
        return call


def _item(picture: ProcessedPicture, placeholder: int) -> PictureItem:
    """The item of a picture without the text in it."""
    inputs = tuple(EncoderInput(name=name, values=values) for name, values in picture.inputs.items())
    length = int((picture.token_ids == placeholder).sum())
    return PictureItem(hash=b"sample", length=length, pixels=np.empty((0, 0, 0, 3), np.uint8), inputs=inputs)


def _tensor(values: Any, sample: Tensor) -> Tensor:
    tensor = torch.tensor(values, device=sample.device)
    return tensor.to(sample.dtype) if tensor.is_floating_point() else tensor


def _is_count(value: Tensor) -> bool:
    """Whether these are the usual positions: 0, 1, and so on."""
    return value.dim() <= 2 and value.flatten().equal(torch.arange(value.numel(), device=value.device))


def _is_ones(value: Tensor) -> bool:
    return value.dim() == 2 and bool(value.all())


_USUAL: dict[str, tuple[Callable[[Tensor], bool], str]] = {
    "position_ids": (_is_count, _POSITIONS),
    "cache_position": (_is_count, _POSITIONS),
    "attention_mask": (_is_ones, _MASKS),
}


def _check_arguments(call: dict[str, Any]) -> None:
    for name, value in call.items():
        if name == "inputs_embeds" or value is None or isinstance(value, bool):
            continue
        is_usual, meaning = _USUAL.get(name, (None, f"{name} beside embeddings (as DeepStack)"))
        if is_usual is None or not isinstance(value, Tensor) or not is_usual(value):
            raise UnsupportedModel(f"it gives its language model {meaning}, which only a family can do")
