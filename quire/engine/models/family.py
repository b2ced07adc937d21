"""Family: everything that Quire knows about one architecture, apart from the layers it is built of.

A module in `families/` lists its records in `FAMILIES`; a package outside the tree offers its own as entry points.
Read without torch, as configs are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from quire.engine.client.audio import AudioInfo
from quire.engine.client.picture_processor import ProcessedPicture
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.protocol import AudioItem, PictureItem
from quire.engine.client.streaming import Streams
from quire.engine.models.config.adapter import AdapterConfig
from quire.engine.models.config.bidirectional import is_not_causal
from quire.engine.models.config.image_processor import Normalization
from quire.engine.models.specs.decoder import CTCSpec, DecoderSpec, EncoderSpec, TransducerSpec
from quire.engine.models.specs.dual_encoder import DualEncoderSpec
from quire.engine.models.specs.pooler import NO_HEADS, HeadReaders, PoolerSpec
from quire.engine.models.specs.speech_to_text import SpeechToTextSpec
from quire.engine.models.specs.tensor_names import WeightNames

if TYPE_CHECKING:  # families are read without torch
    from torch import Tensor

Spec = DecoderSpec | EncoderSpec | CTCSpec | TransducerSpec | DualEncoderSpec
WithoutCache = EncoderSpec | CTCSpec | TransducerSpec | DualEncoderSpec  # specs of models that have no KV cache
S = TypeVar("S", DecoderSpec, EncoderSpec, CTCSpec, TransducerSpec)
RawConfig = dict[str, Any]  # the parsed config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFacts:
    """How a language model reads pictures.

    Attributes:
        info: what the front end needs to know of it.
        normalization: of pixels; None: transformers' processor has normalized them.
        levels: how many embeddings a token has beside its own, which are added to hidden states (DeepStack).
        samples: pictures that transformers' processor has prepared, if it prepares those of requests: a small one, and
            one that takes about as much memory as any.
    """

    info: PictureInfo
    normalization: Normalization | None = None
    levels: int = 0
    samples: tuple[ProcessedPicture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a model does, beside its architecture; read from the files of its folder.

    Attributes:
        pooler: its pooling; None if it generates.
        speech: facts about a model that only transcribes; None for others.
        audio: facts about a language model that reads audio; None for others.
        pictures: facts about a language model that reads pictures; None for others.
        streaming: facts about a model that transcribes audio while it arrives; None for others.
        adapter: adapter that requests with audio are computed with; None: there is none.
        picture_adapter: the same of requests with pictures, whether they have audio or not.
    """

    pooler: PoolerSpec | None = None
    speech: SpeechToTextSpec | None = None
    audio: AudioInfo | None = None
    pictures: PictureFacts | None = None
    streaming: Streams | None = None
    adapter: AdapterConfig | None = None
    picture_adapter: AdapterConfig | None = None


NO_FACTS = Facts()


@dataclass(frozen=True, kw_only=True)
class Family(Generic[S]):
    """The models of one architecture.

    Attributes:
        name: the name, which a spec carries in its field `family`.
        config_types: values of `model_type` in config.json.
        kind: what its models are. An encoder of text has no language model's head.
        spec: makes the spec of a Hugging Face config.
        tensors: how its checkpoints name their tensors, or a function that says so for a spec and its facts.
        facts: reads what a model's folder says beside the config. None: only how the model pools, if it does.
        head: "CTC", for example, if models transcribe only with a head of that name.
        heads: how configs describe heads for labels and for masked tokens.
        is_bidirectional: whether the config of a decoder sets attention in both directions.
        published: by a `model_type` under which models were published with code of their own, the function that makes
            a config.json under a type that transformers has. It returns its argument if that is another model.
        config: makes a config of a config.json whose type transformers does not know; None: transformers does.
    """

    name: str
    config_types: tuple[str, ...]
    spec: Callable[[Any], S]
    tensors: WeightNames | Callable[[S, Facts], WeightNames]
    kind: Literal["decoder", "encoder", "ctc", "transducer"] = "decoder"
    facts: Callable[[Path, Any, S], Facts] | None = None
    head: str = ""
    heads: HeadReaders = NO_HEADS
    is_bidirectional: Callable[[Any], bool] = is_not_causal
    published: Mapping[str, Callable[[RawConfig], RawConfig]] = field(default_factory=dict)
    config: Callable[[RawConfig], Any] | None = None


def itself(config: Any) -> Any:
    """Return the config of a checkpoint that has one model."""
    return config


@dataclass(frozen=True, kw_only=True)
class AudioTower:
    """The part of a `Composite` that reads audio beside its `Tower`, which transformers' modules run as well.

    Attributes:
        facts: reads how the model reads audio, as that of a `Tower`; None: it does not.
        encode: makes the embeddings of an item: (tokens, size). Given transformers' model without its language model,
            and the features (rows, columns).
        module_name: as of a `Tower`.
        modules: attributes of transformers' model that only audio needs.
    """

    facts: Callable[[Path, Any, DecoderSpec], AudioInfo | None]
    encode: Callable[[Any, Tensor, AudioItem], Tensor]
    module_name: Callable[[str], str | None]
    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The part of a `Composite` that reads pictures, which transformers' modules run.

    Attributes:
        language_model: the attribute of transformers' model that is its language model, which is deleted.
        facts: reads how the model reads pictures; given its folder, the config, and the spec of the language model.
        encode: makes the embeddings of an item: (tokens, size). Given transformers' model without its language model,
            the normalized pixels (images, 3, height, width), and the item.
        module_name: the name that a tensor of the checkpoint has in transformers' model; None: it belongs to another
            part, or to none.
        config: the config of transformers' model, given that of the checkpoint.
        unused: further attributes that are deleted, in other modules behind dots.
        has_rotary_qkv: its attention is as in Qwen2-VL: modules with a projection `qkv` to queries, keys and values,
            whose heads are rotated in halves, and one behind it, `proj`.
        token_embeddings: makes the embeddings of tokens that do not have those of the language model's table: the first
            of these tokens, and (tokens, size) of it and all later ones. Given transformers' model. None: there are
            none.
        audio: the part that reads audio; None: there is none, or it is part of the spec (`DecoderSpec.encoder`).
    """

    language_model: str
    facts: Callable[[Path, Any, DecoderSpec], PictureFacts]
    encode: Callable[[Any, Tensor, PictureItem], Tensor]
    module_name: Callable[[str], str | None]
    config: Callable[[Any], Any] = itself
    unused: tuple[str, ...] = ()
    has_rotary_qkv: bool = False
    audio: AudioTower | None = None
    token_embeddings: Callable[[Any], tuple[int, Tensor]] | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackTower:
    """The part of a `Composite` that reads pictures, if transformers runs all of it but the language model as it is.

    Attributes:
        facts: as of a `Tower`.
        module_name: the name that a tensor of transformers' whole model has in the part; None: it is not in it.
    """

    facts: Callable[[Path, Any, DecoderSpec], PictureFacts]
    module_name: Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class Composite:
    """Models of several parts, of which one is a language model of another family.

    Attributes:
        name, config_types, published, config: as of a `Family`.
        language_model: the type of the language model's config, and that config.
        spec: makes the spec of the whole model; given the config, and the spec of the language model.
        tensors: how its checkpoints name their tensors; given the spec, and the names of the language model's family.
        facts: as of a `Family`. None: it generates text, and how it pools is read as for its language model.
        has_adapter: its models are trained with an adapter for requests with audio, and one for requests with pictures
            if they read any.
        plain_name: the name that a tensor has in checkpoints of the language model alone; None: it belongs to a part
            that is not loaded. Of models whose other parts are loaded, it returns its argument.
        tower: the part that reads pictures; None: it is not supported.
    """

    name: str
    config_types: tuple[str, ...]
    language_model: Callable[[Any], tuple[str, Any]]
    spec: Callable[[Any, DecoderSpec], DecoderSpec]
    tensors: Callable[[DecoderSpec, WeightNames], WeightNames]
    facts: Callable[[Path, Any, DecoderSpec], Facts] | None = None
    has_adapter: bool = False
    plain_name: Callable[[str], str | None] = str
    tower: Tower | FallbackTower | None = None
    published: Mapping[str, Callable[[RawConfig], RawConfig]] = field(default_factory=dict)
    config: Callable[[RawConfig], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TwoTowers:
    """Models of an encoder of texts and one of pictures, whose embeddings are compared; transformers' modules run them.

    Attributes:
        name, config_types, published, config: as of a `Family`.
        spec: makes the spec of a Hugging Face config.
        pictures: reads how the model reads pictures; given its folder, and the config.
        encode_texts: makes the embeddings of texts: (texts, size). Given transformers' model, and (texts, tokens)
            token ids.
        encode_picture: makes the embedding of a picture: (1, size). Given transformers' model, the normalized pixels
            (1, 3, height, width), and the item.
    """

    name: str
    config_types: tuple[str, ...]
    spec: Callable[[Any], DualEncoderSpec]
    pictures: Callable[[Path, Any], PictureFacts]
    encode_texts: Callable[[Any, Tensor], Tensor]
    encode_picture: Callable[[Any, Tensor, PictureItem], Tensor]
    published: Mapping[str, Callable[[RawConfig], RawConfig]] = field(default_factory=dict)
    config: Callable[[RawConfig], Any] | None = None


AnyFamily = Family[Any] | Composite | TwoTowers


def text_config(config: Any) -> tuple[str, Any]:
    """The language model of a composite config that has it under the usual name."""
    return config.text_config.model_type, config.text_config
