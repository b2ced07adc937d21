"""ModelInfo: facts about a loaded model. Its `kind` says what the model does, with the facts of such models."""

from __future__ import annotations

from typing import Literal

import msgspec

from quire.engine.client.audio import AudioInfo
from quire.engine.client.convolutions import Convolution, count_columns, count_positions
from quire.engine.client.kv_transfer import KVTransferInfo
from quire.engine.client.pictures import PictureInfo
from quire.engine.client.pooling_params import PoolingTask, PoolingType
from quire.engine.client.streaming import Streams


class Generates(msgspec.Struct, frozen=True, kw_only=True, tag="generates"):
    """A model that generates text.

    Attributes:
        audio: how audio becomes part of its prompts; it then transcribes as well. None: it does not read audio.
        pictures: how pictures become part of its prompts. None: it does not read them.
        longest_prompt: most tokens of a prompt, if they attend to each other in both directions (a prefix language
            model): one step computes all of them. None: tokens attend to earlier ones.
    """

    audio: AudioInfo | None = None
    pictures: PictureInfo | None = None
    longest_prompt: int | None = None


class Pools(msgspec.Struct, frozen=True, kw_only=True, tag="pools"):
    """A model that pools its hidden states.

    Attributes:
        tasks: its pooling tasks.
        pooling_type: how token hidden states are pooled, where a request does not say so.
        embedding_size: number of values of an "embed" result.
        token_embedding_size: number of values of each token's "token_embed" result.
        matryoshka: embeddings may be cut to fewer dimensions.
        dimensions: the dimensions that they may be cut to; empty: any.
        labels: names of the labels of "classify" and "token_classify", by index.
        score_method: how a query and a document are compared: by their embeddings, by running the model on both
            together, or by the embeddings of their tokens. None if they cannot be compared.
        sparse: embeddings have a value for each token of the vocabulary, most of them 0.
        chunked: texts beyond the context length are embedded in chunks, and their embeddings averaged.
        max_embed_len: tokens of the longest text to embed; None: the context length, or no limit with `chunked`.
        padded_to: texts are padded to so many tokens; 0: they are not.
        pictures: how pictures become part of its prompts. None: it does not read them.
    """

    tasks: tuple[PoolingTask, ...]
    pooling_type: PoolingType = "last"
    embedding_size: int
    token_embedding_size: int
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    score_method: Literal["cosine", "dot", "cross_encoder", "max_sim"] | None = None
    sparse: bool = False
    chunked: bool = False
    max_embed_len: int | None = None
    padded_to: int = 0
    pictures: PictureInfo | None = None


class Transcribes(msgspec.Struct, frozen=True, kw_only=True, tag="transcribes"):
    """A model that only transcribes, each window of audio as a whole. A request has one item.

    Attributes:
        kind: how text is made: "whisper" has prompts of special tokens, "moonshine" begins with the start token alone,
            a "ctc" model gives the token of each position.
        features: features of an item: whisper's log-mel spectrogram; one that is normalized over time; samples, or
            samples that are normalized to a mean of 0 and a variance of 1.
        sample_rate: sample rate of the audio that features are made from, in Hz.
        num_mel_bins, num_columns: most rows and columns of an item's features; samples are one row. Whisper's may have
            fewer columns, an even number of them, but most models have been trained with padded audio only.
        convolutions: steps from columns of features (before the encoder) to the encoder's positions.
        window_seconds: seconds of audio in one item.
        num_positions: positions after the encoder of one item, `time_precision` seconds each.
        max_output_tokens: maximum number of tokens of prompt and output together.
        languages: token of each ISO code; empty for models of one language.
        start_token: begins each prompt, after the earlier text if there is any; None for CTC, as `end_token`.
        transcribe_token, translate_token: None for models of one language.
        timestamp_begin: token of the timestamp 0.00; each further one is `time_precision` later. None: the model writes
            no timestamps.
        max_initial_timestamp: see `TimestampRule.max_initial`.
        no_speech_token: its probability at the start token is that of no speech.
        previous_token: begins the earlier text, which conditions the output.
        suppress_tokens: never to be sampled.
        begin_suppress_tokens: never to be sampled first.
        blank_token: the token of CTC that stands for no text.
        aligns_words: times of words are known: from the task "align", or from the positions of CTC.
    """

    kind: Literal["whisper", "moonshine", "ctc"]
    features: Literal["log_mel", "normalized_log_mel", "samples", "normalized_samples"] = "log_mel"
    sample_rate: int
    num_mel_bins: int
    num_columns: int
    convolutions: tuple[Convolution, ...] = (Convolution(3, 1, 1), Convolution(3, 2, 1))
    window_seconds: float
    num_positions: int
    max_output_tokens: int
    languages: dict[str, int] = {}
    start_token: int | None = None
    transcribe_token: int | None = None
    translate_token: int | None = None
    no_timestamps_token: int | None = None
    timestamp_begin: int | None = None
    max_initial_timestamp: int | None = None
    no_speech_token: int | None = None
    previous_token: int | None = None
    end_token: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    blank_token: int | None = None
    aligns_words: bool
    time_precision: float = 0.02

    def positions(self, columns: int) -> int:
        """The number of encoder positions of an item with `columns` columns of features."""
        return min(self.num_positions, count_positions(self.convolutions, columns))

    @property
    def min_columns(self) -> int:
        """The fewest columns of features that an item may have."""
        return count_columns(self.convolutions, 1)


ModelKind = Generates | Pools | Transcribes | Streams


class KVEventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the events of an engine's prefix cache are published; see `KVEventsConfig`, whose names are vLLM's.

    Attributes:
        endpoint, replay_endpoint: with the ports that the sockets have.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str
    replay_endpoint: str | None
    buffer_steps: int
    hwm: int
    max_queue_size: int
    topic: str
    encoding: Literal["map", "array"]
    buffer_bytes: int


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about a loaded model, or about one without an engine, as far as its files say them.

    Attributes:
        device, dtype: empty if no engine runs it.
        step_bytes: memory of a GPU for intermediate results of the largest step, which is not held between steps; 0
            where it was not measured.
        kind: what the model does.
        kernels: with which kernels it is computed, such as their instruction set.
        attention_backend: kernels of attention over the KV cache; empty without a cache.
        weight_format: how its weights are quantized, and who said so; empty if they are not.
        cache_dtype: data type of the KV cache; empty without one.
        cache_limit: what the size of the KV cache follows from, such as a setting.
        saves_states: states of sequences are saved for its prefix cache, best where messages end.
        kv_events: where the events of its prefix cache are published; None: nowhere.
        kv_transfer: whether KV blocks are sent to other engines and read from them; None: they are not.
    """

    architecture: str
    implementation: Literal["quire", "transformers"]
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and output together
    num_blocks: int
    block_size: int
    weight_bytes: int
    cache_bytes: int
    step_bytes: int = 0
    kind: ModelKind = Generates()
    kernels: str = ""
    attention_backend: str = ""
    weight_format: str = ""
    cache_dtype: str = ""
    cache_limit: str = ""
    saves_states: bool = False
    kv_events: KVEventSource | None = None
    kv_transfer: KVTransferInfo | None = None

    @property
    def media_tokens(self) -> frozenset[str]:
        """Texts of the tokens that stand for media in prompts."""
        if not isinstance(self.kind, Generates | Pools):
            return frozenset()
        audio, pictures = self.kind.audio if isinstance(self.kind, Generates) else None, self.kind.pictures
        texts = set() if audio is None else {audio.placeholder_text}
        if pictures is not None and not pictures.alone:
            texts |= {pictures.placeholder_text, pictures.token}
        if pictures is not None and pictures.video is not None:
            texts |= {pictures.video.placeholder_text, pictures.video.token}
        return frozenset(texts)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of the model: "generate", "transcribe" or pooling tasks; "score" also if it compares embeddings."""
        match self.kind:
            case Generates(audio=None):
                return ("generate",)
            case Generates():
                return ("generate", "transcribe")
            case Pools(tasks=tasks, score_method=method):
                return (*tasks, "score") if method is not None and "score" not in tasks else tasks
            case _:
                return ("transcribe",)
