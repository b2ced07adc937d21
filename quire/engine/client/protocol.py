"""All messages between the front end and an engine core.

Arrays are sent as raw ZMQ frames behind the msgpack-encoded message (see `transport`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.client.kv_transfer import BlockTransfer, RemoteBlocks
from quire.engine.client.model_info import ModelInfo
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.trace_context import TraceContext

TokenArray = NDArray[np.int32]
PooledArray = NDArray[np.float32]
FeatureArray = NDArray[np.float32]
PixelArray = NDArray[np.uint8]
FinishReason = Literal["stop", "length", "abort", "error"]
MemoryTag = Literal["weights", "kv_cache"]  # what an engine frees while it sleeps, by vLLM's names
SleepLevel = Literal[1, 2]


class AudioItem(msgspec.Struct, frozen=True, kw_only=True, tag="audio"):
    """Audio, or a part of it that is encoded apart.

    Attributes:
        hash: hash of everything that its encoding depends on; equal hashes mean equal items. Empty if the model reads
            audio while it generates (see `Streams`): such audio is never shared.
        start, length: its placeholder tokens in the prompt, whose embeddings the item's encoding replaces. Both are 0
            where the model only transcribes (see `Transcribes`, `Streams`): the item then has no tokens.
        features: (rows, columns) float32: a spectrogram, or samples in one row; see `Transcribes.features`.
        encoded_columns: number of columns to encode; only convolutions read later ones. None: all.
        columns_before: number of columns before them, of the audio that the item continues; only convolutions read
            them.
        beside_pictures: the prompt has pictures as well. The scheduler sets it for models in which the encoding depends
            on that, and changes the hash.
        ends_video: it is the end of a video with sound: the two tokens behind it have the same rotary position.
    """

    hash: bytes
    start: int = 0
    length: int = 0
    features: FeatureArray
    encoded_columns: int | None = None
    columns_before: int = 0
    beside_pictures: bool = False
    ends_video: bool = False

    @property
    def columns(self) -> int:
        """Number of columns of features that are encoded."""
        left: int = self.features.shape[1] - self.columns_before
        return left if self.encoded_columns is None else self.encoded_columns


class EncoderInput(msgspec.Struct, frozen=True, kw_only=True):
    """An array that transformers' processor has made of a picture, and the argument of its model that it is."""

    name: str
    values: NDArray[Any]


class PictureItem(msgspec.Struct, frozen=True, kw_only=True, tag="picture"):
    """A picture, a tile of one that is encoded apart, or frames of a video that are encoded together.

    Attributes:
        hash: hash of everything that its encoding and its places depend on; equal hashes mean equal items.
        start, length: its tokens in the prompt.
        pixels: (images, height, width, 3) uint8, RGB, resized for the encoder: one image, tiles, or frames; none with
            an `encoding` or `inputs`.
        inputs: what the encoder reads in place of pixels, if transformers' processor has prepared the picture.
        encoding: (embeddings, size) float32, its encoding, if the client has computed it.
        text_offsets: (n,) int32, in ascending order: which of its tokens are text, such as ends of rows, and keep their
            own embeddings; the encoding replaces those of all others. None: all are replaced.
        positions: (3, length) int32, rotary positions of time, height and width of its tokens, counted from where it
            begins, in models that have them. None: each token is one position later than the one before.
        advance: rotary positions from where it begins to the token behind it; None: `length`. 0: what follows, which
            is another part of the same video, begins at the same position.
        original_size: height and width of the picture, for encoders that need to know how much of a tile is padding:
            before it was resized, or of `PaddedTiles` those that it covers.
        is_video: it is a part of a video.
    """

    hash: bytes
    start: int = 0
    length: int
    pixels: PixelArray
    inputs: tuple[EncoderInput, ...] = ()
    encoding: FeatureArray | None = None
    text_offsets: TokenArray | None = None
    positions: TokenArray | None = None
    advance: int | None = None
    original_size: tuple[int, int] | None = None
    is_video: bool = False

    @property
    def embeddings(self) -> int:
        """Number of its tokens that are no text."""
        return self.length - (0 if self.text_offsets is None else len(self.text_offsets))


MediaItem = AudioItem | PictureItem  # an input beside the tokens


def position_leap(item: MediaItem) -> int:
    """How many rotary positions the token behind an item is farther than by the item's tokens."""
    if isinstance(item, PictureItem):
        return 0 if item.positions is None or item.advance is None else item.advance - item.length
    return -int(item.ends_video)  # the tokens behind it share a position


def only_audio(items: Sequence[MediaItem]) -> tuple[AudioItem, ...]:
    """Those of some items that are audio."""
    return tuple(item for item in items if isinstance(item, AudioItem))


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """What requests to an engine have in the front end and in the core, beside prompt and parameters.

    Attributes:
        priority: lower runs first, under the priority policy.
        cache_salt: only requests with equal salts share prefix blocks.
        items: inputs beside the tokens, in the order of their spans, which do not overlap.
        open: more follows in `ExtendRequest` messages: of the prompt, and nothing is generated before its end; or of
            the audio, if the model reads it while it generates (see `Streams`). Of requests that generate.
        flow: fair-queueing key; flows get equal engine time, and equal parts of what is kept for other engines.
        is_held: the blocks of its prompt are kept for another engine when it ends.
        remote: blocks of its prompt in another engine, which are read instead of computed.
        message_ends: int32, positions in the prompt behind which its messages end, in ascending order, for snapshots of
            states; None: unknown.
        next_turn: position at which the prompt of a chat's next turn is expected to part from this one; 0: unknown.
        second_text_start: index of the first token of the second text of a pair; of requests that pool.
        second_text_end: index of the first token behind it; None: the end of the prompt.
    """

    priority: int = 0
    cache_salt: str | None = None
    items: tuple[MediaItem, ...] = ()
    open: bool = False
    flow: str = ""
    is_held: bool = False
    remote: RemoteBlocks | None = None
    message_ends: TokenArray | None = None
    next_turn: int = 0
    second_text_start: int | None = None
    second_text_end: int | None = None


class AddRequest(RequestFields, frozen=True, tag="add"):
    """Run a request on `prompt`, 1-D int32 token ids; the type of `params` selects generation or pooling.

    `trace`: the span of the HTTP request that it is part of, if that is sampled.
    """

    request_id: str
    prompt: TokenArray
    params: SamplingParams | PoolingParams
    trace: TraceContext | None = None

    @property
    def sampling_params(self) -> SamplingParams:
        """The parameters of a request that generates."""
        assert isinstance(self.params, SamplingParams)
        return self.params

    @property
    def audio_items(self) -> tuple[AudioItem, ...]:
        """The items that are audio."""
        return only_audio(self.items)


class AddRequests(msgspec.Struct, frozen=True, tag="add_many"):
    """Several requests in one message. The core's channel gives them out one by one."""

    requests: list[AddRequest]


class ExtendRequest(msgspec.Struct, frozen=True, tag="extend"):
    """Append tokens to the prompt of an open request, or audio to its audio; ignored if there is none of that id.

    Attributes:
        tokens: 1-D int32 token ids; may be empty, and must be if the model reads audio while it generates.
        last: the prompt or the audio is complete.
        items: items whose spans are in these tokens; their `start` counts from the first of them.
    """

    request_id: str
    tokens: TokenArray
    last: bool = False
    items: tuple[MediaItem, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop these requests; nothing more is sent about them."""

    request_ids: list[str]


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Free the memory of weights and KV cache; the core answers with `SleepState`. No request may be left.

    Attributes:
        level: 1: the weights are kept in the memory of the host; 2: they are dropped, and read again at wake-up.
    """

    level: SleepLevel


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Restore what sleeps of these; the core answers with `SleepState`. Requests can run once nothing sleeps."""

    tags: frozenset[MemoryTag]


class ResetCaches(msgspec.Struct, frozen=True, tag="reset_caches"):
    """Compute anew, for later requests, what is cached. Requests in the batch keep their blocks.

    Attributes:
        prefixes: forget the prefix cache.
        items: forget the encoder cache.
        preempt: requests in the batch compute their tokens anew as well.
        external: forget the blocks of the second tier as well.
    """

    prefixes: bool = False
    items: bool = False
    preempt: bool = False
    external: bool = False


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Run no more steps until `Resume`; requests wait.

    Attributes:
        drain: requests that have arrived end first; later ones wait.
        is_temporary: the front end sends `Resume` by itself. If it ends before, the engine goes on.
    """

    drain: bool = False
    is_temporary: bool = False


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Run steps again."""


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights"):
    """Replace the weights by those in a folder. Caches are forgotten, and requests in the batch compute anew."""

    folder: str


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record steps with the profiler."""


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """Write what the profiler has recorded."""


Command = ResetCaches | Pause | Resume | UpdateWeights | StartProfile | StopProfile


class RunCommand(msgspec.Struct, frozen=True, tag="run_command"):
    """Do what an operator asks for, between two steps; the core answers with `CommandDone` of this serial."""

    serial: int
    command: Command


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Liveness probe; the core answers with `Pong`."""

    serial: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop the core."""


ClientMessage = AddRequest | ExtendRequest | Abort | Sleep | Wake | RunCommand | Ping | Shutdown


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A front end that shares the core with others is there; answered with `EngineState`, and with `Ready` if it is."""


class FrontEndLeft(msgspec.Struct, frozen=True, tag="left"):
    """A front end that shares the core has ended, as another one says: its requests are aborted.

    `identity`: its identity in the transport.
    """

    identity: str


SharedMessage = ClientMessage | AddRequests | Hello | FrontEndLeft


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token itself, then of the top tokens in descending order.

    If a request lists tokens, these come in place of the top tokens. The three lists have equal length; `ranks` count
    from 1, those of listed tokens are 0.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class TokensOutput(msgspec.Struct, array_like=True, tag="tokens"):
    """New tokens of one generating request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that finished the sequence
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token; None at the first position
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    scheduled_at: float = 0.0  # monotonic seconds
    token_probs: list[float] | None = None  # with the first token; see `SamplingParams.token_probs`
    preemptions: int = 0  # how often the request was preempted so far
    prefill_chunks: int = 0  # steps that computed tokens of the prompt
    draft_tokens: int = 0  # of speculative decoding, verified so far
    accepted_tokens: int = 0  # part of them
    loaded_tokens: int = 0  # part of `cached_tokens` that was not in memory, but in a second tier or another engine
    held_blocks: RemoteBlocks | None = None  # with the last token: what is kept for another engine


class PooledOutput(msgspec.Struct, array_like=True, tag="pooled"):
    """The result of a pooling request, which is then finished. `PoolingParams.task` decides the shape of `data`."""

    request_id: str
    data: PooledArray
    cached_tokens: int = 0
    scheduled_at: float = 0.0
    loaded_tokens: int = 0


class ErrorOutput(msgspec.Struct, array_like=True, tag="error"):
    """One request was refused or failed; other requests continue.

    Attributes:
        invalid: something is wrong with the request; else the engine failed.
        is_remote: another engine failed, which should have sent blocks.
    """

    request_id: str
    error: str
    invalid: bool = False
    is_remote: bool = False


RequestOutput = TokensOutput | PooledOutput | ErrorOutput


class BlockLife(msgspec.Struct, frozen=True, array_like=True):
    """How long a KV block has held cached content, which was evicted now; in seconds.

    Attributes:
        lifetime: since the block was allocated.
        idle: since a request has used it.
    """

    lifetime: float
    idle: float


LostReason = Literal["no_snapshot", "evicted", "template_changed"]
LoadSource = Literal["host", "disk", "p2p"]  # of KV blocks: a tier, or another engine


class StepStats(msgspec.Struct, array_like=True):
    """Gauges of the engine after a step, and counters of this step alone."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    step_tokens: int = 0  # prompt tokens that were computed, and tokens that were generated
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    step_seconds: float = 0.0
    item_queries: int = 0  # items looked up in the encoder cache
    item_hits: int = 0  # items found in the encoder cache
    deferred: int = 0  # part of `waiting`: those that wait for more input
    corrupted: int = 0  # sequences that ended because the model computed NaN for them
    step: int = 0  # its number, from 1; 0: these are not the statistics of a step
    ended_at: float = 0.0  # monotonic seconds; it began `step_seconds` before
    accepted_per_position: list[int] = []  # of each position of a draft, how many drafts had their token there accepted
    evicted_blocks: list[BlockLife] = []  # those that are sampled; see `BlockResidency`
    block_reuse_gaps: list[float] = []  # seconds between two uses of a cached block that is sampled
    external_queries: int = 0  # tokens that were not in memory, and looked up in a second tier or another engine
    external_hits: int = 0
    hits_by_source: dict[LoadSource, int] = {}  # `external_hits` by where they were
    tier_bytes: int = 0  # that the files of the tier take, a gauge
    host_usage: float = 0.0  # share of the host memory for blocks that has some, a gauge
    unwritten_blocks: int = 0  # blocks that the last tier lacks, a gauge
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    file_read_bytes: int = 0  # from files to host memory, if both are tiers
    file_read_seconds: float = 0.0
    file_written_bytes: int = 0
    file_write_seconds: float = 0.0
    held_blocks: int = 0  # that are kept for other engines, a gauge
    expired_holds: int = 0  # prompts whose blocks were given back before another engine has read them
    transfers: list[BlockTransfer] = []  # from other engines
    failed_transfers: int = 0
    lost_tokens: dict[LostReason, int] = {}  # prompt tokens that were computed before and are not cached, by reason
    snapshot_hits: int = 0  # sequences that began with saved states
    snapshots_saved: int = 0
    snapshots_evicted: int = 0
    snapshot_bytes: int = 0  # of saved states, a gauge


def gauges_of(stats: StepStats) -> StepStats:
    """Return statistics with the same gauges, which count nothing."""
    return StepStats(
        running=stats.running,
        waiting=stats.waiting,
        blocks_used=stats.blocks_used,
        blocks_total=stats.blocks_total,
        deferred=stats.deferred,
        tier_bytes=stats.tier_bytes,
        unwritten_blocks=stats.unwritten_blocks,
        held_blocks=stats.held_blocks,
        snapshot_bytes=stats.snapshot_bytes,
    )


class StepOutput(msgspec.Struct, tag="step"):
    """The outputs of all requests in one step."""

    outputs: Sequence[RequestOutput]
    stats: StepStats


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and requests are accepted."""

    info: ModelInfo


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`."""

    serial: int


class SleepState(msgspec.Struct, frozen=True, tag="sleep_state"):
    """Answer to `Sleep` and `Wake`.

    Attributes:
        asleep: what has no memory; empty: the engine is awake.
        error: why it did not do what it was asked; None if it did.
    """

    asleep: frozenset[MemoryTag]
    error: str | None = None


class CommandDone(msgspec.Struct, frozen=True, tag="command_done"):
    """Answer to `RunCommand`.

    Attributes:
        error: why it was not done, and nothing has changed; None if it was.
        invalid: something is wrong with the command; else the state of the engine does not allow it now.
    """

    serial: int
    error: str | None = None
    invalid: bool = False


class EngineState(msgspec.Struct, frozen=True, tag="engine_state"):
    """What other front ends have made of a core that they share.

    Attributes:
        asleep: what has no memory.
        level: of the last sleep.
        is_paused: no step is run, or none will be once requests that have begun have ended.
        weights: the folder of those that have replaced the first ones; None: none have.
    """

    asleep: frozenset[MemoryTag] = frozenset()
    level: SleepLevel = 1
    is_paused: bool = False
    weights: str | None = None


class CoreDied(msgspec.Struct, frozen=True, tag="died"):
    """The core has ended; no further message follows."""

    error: str


CoreMessage = Ready | StepOutput | Pong | SleepState | CommandDone | EngineState | CoreDied
