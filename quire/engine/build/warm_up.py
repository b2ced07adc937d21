"""Steps that run before an engine is ready, so that no request waits until a kernel is compiled.

Triton compiles a kernel for each combination of data types, constants and alignments of its arguments, when it is first
called with them. They follow from the model, from block sizes that depend on the number of rows, and from what requests
ask for. So the steps have numbers of tokens, sequences and positions that are powers of two, and sequences with each
kind of sampling. They run like those of requests, on zeros, in blocks that no request has yet.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from quire.config.options import EngineOptions
from quire.engine.build.encoder_memory import bidirectional_tokens, vision_of
from quire.engine.client.audio import AudioInfo
from quire.engine.client.convolutions import count_columns
from quire.engine.client.model_info import Generates, ModelKind, Pools, Transcribes
from quire.engine.client.pictures import (
    AnyResolution,
    CanvasTiles,
    Geometry,
    PaddedTiles,
    PatchBudget,
    PatchRows,
    SmartResize,
    SplitTiles,
    TokenBudget,
    TransformersProcessor,
)
from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, AudioItem, PictureItem
from quire.engine.client.sampling_params import SamplingParams
from quire.engine.client.token_mask import token_mask
from quire.engine.execution.executor import Executor, PendingStep
from quire.engine.execution.runner import LOGITS_CHUNK
from quire.engine.models.loader import LoadedModel
from quire.engine.scheduling.block_tables import ONE_GROUP, BlockGroups
from quire.engine.scheduling.plan import (
    BidirectionalSpan,
    CrossAttentionItem,
    EncodedItem,
    NewSequence,
    PlaceholderTokens,
    ScheduledSequence,
    StepPlan,
)

logger = logging.getLogger(__name__)
_GREEDY = SamplingParams(max_tokens=1, temperature=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpLimits:
    """The largest steps of an engine, and what its requests may ask for.

    Attributes:
        tokens: most tokens of a step; sequences: most sequences.
        context_len: most tokens of a sequence.
        num_blocks, block_size, groups: of the KV cache.
        draft: most draft tokens of a sequence; 0: there are no drafts.
        drafting: most sequences of a step that have one.
        lora_id: an adapter of the model; None: it has none.
        kind: what the model does.
        is_prefix_lm: the tokens of each prompt attend to each other in both directions.
    """

    tokens: int
    sequences: int
    context_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    kind: ModelKind
    groups: BlockGroups = ONE_GROUP
    draft: int = 0
    drafting: int = sys.maxsize
    lora_id: int | None = None
    is_prefix_lm: bool = False

    @property
    def cross_blocks(self) -> int:
        """Blocks of the encoded positions that a sequence attends to."""
        return -(-self.kind.num_positions // self.block_size) if isinstance(self.kind, Transcribes) else 0

    @property
    def pooling(self) -> PoolingParams | None:
        """Parameters of a request, if the model pools."""
        return _pooling_params(self.kind) if isinstance(self.kind, Pools) else None

    @property
    def audio(self) -> AudioInfo | None:
        """How the model reads audio among its tokens, if it does."""
        return self.kind.audio if isinstance(self.kind, Generates) else None

    @property
    def has_bidirectional_pictures(self) -> bool:
        """Whether the tokens of a picture attend to each other in both directions."""
        pictures = self.kind.pictures if isinstance(self.kind, Generates | Pools) else None
        return pictures is not None and pictures.bidirectional

    @property
    def length(self) -> int:
        """Most tokens of a sequence whose blocks fit into the KV cache."""
        blocks = self.num_blocks - self.cross_blocks
        return self.groups.longest(blocks, self.context_len, self.tokens, self.block_size)

    def new_blocks(self, first: int, end: int) -> tuple[int, ...]:
        """Blocks of all groups for those from `first` to `end` of a sequence."""
        return tuple(index % self.num_blocks for index in range(first, end)) * len(self.groups.windows)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of a step, which computes its tokens from `start` on and samples.

    Attributes:
        length: tokens that are known.
        generated: those from `start` on are no prompt.
        draft: tokens after them that are a draft.
        columns: of the audio whose embeddings its tokens have; 0: they have their own.
        bidirectional: its tokens attend to each other in both directions.
    """

    length: int
    start: int = 0
    generated: bool = False
    draft: int = 0
    params: SamplingParams | PoolingParams = _GREEDY
    prompt_logprobs: int | None = None
    lora_id: int | None = None
    columns: int = 0
    bidirectional: bool = False

    @property
    def count(self) -> int:
        """Tokens that the step computes."""
        return self.length - self.start + self.draft


def decoder_limits(
    loaded: LoadedModel,
    kind: ModelKind,
    options: EngineOptions,
    context_len: int,
    num_blocks: int,
    spare_slots: int,
    groups: BlockGroups,
) -> WarmUpLimits:
    """The limits of an engine around a decoder.

    `context_len`: tokens of the longest sequence; `spare_slots`: for the states of drafts.
    """
    return WarmUpLimits(
        tokens=options.max_num_batched_tokens,
        sequences=options.max_num_seqs,
        context_len=context_len,
        num_blocks=num_blocks,
        block_size=options.block_size,
        vocab_size=loaded.vocab_size,
        groups=groups,
        draft=options.num_speculative_tokens if options.speculative_method == "ngram" else 0,
        drafting=spare_slots if groups.has_states else sys.maxsize,
        lora_id=next(iter(loaded.adapters), None),
        kind=kind,
        is_prefix_lm=bidirectional_tokens(loaded) == "prompt",
    )


def _pooling_params(kind: Pools) -> PoolingParams:
    return PoolingParams(task=kind.tasks[0], pooling_type=kind.pooling_type)


def warm_up_encoder(
    executor: Executor, kind: ModelKind, options: EngineOptions, context_len: int, poll: Callable[[], None]
) -> None:
    """Warm up an engine around an encoder, of text or audio; see `warm_up`."""
    tokens = options.max_num_batched_tokens
    match kind:
        case Transcribes():
            warm_up(executor, audio_encoder_plans(tokens, kind), poll)
        case Pools():
            warm_up(executor, encoder_plans(tokens, context_len, _pooling_params(kind)), poll)


def warm_up(executor: Executor, plans: list[StepPlan], poll: Callable[[], None], in_flight: int = 1) -> None:
    """Run plans on an executor, some of them at once; `poll` is called between two of them.

    Where only single requests would fail, the failure is logged. What would end the engine is raised.
    """
    started, errors, pending = time.monotonic(), set[str](), deque[PendingStep]()

    def finish_oldest() -> None:
        result = pending.popleft().result()
        errors.update(error.message for error in result.errors.values())
        if result.lost:
            errors.add(f"one with {len(result.lost)} sequences")

    for plan in tqdm(plans, desc="compiling kernels", unit="step", leave=False, disable=None):
        poll()
        pending.append(executor.submit(plan))
        if len(pending) == in_flight:
            finish_oldest()
    while pending:
        finish_oldest()
    for error in sorted(errors):
        logger.warning("some requests will fail: a step of the warm-up failed: %s", error)
    logger.info("compiled the kernels of %d steps in %.1f s", len(plans), time.monotonic() - started)


def decoder_plans(limits: WarmUpLimits) -> list[StepPlan]:
    """The steps of a decoder; the last one removes the sequences of the one before."""
    plans, names, keys = list[StepPlan](), list[str](), list[bytes]()
    for step in _steps(limits):
        sequences = _fitting(step, limits)
        if not sequences:
            continue
        plan = StepPlan(removed=names, evicted=keys)
        names = [f"warm-up-{index}" for index in range(len(sequences))]
        for name, sequence in zip(names, sequences, strict=True):
            plan.new.append(_new(name, sequence, limits, encodes=not plans))
            plan.scheduled.append(_scheduled(name, sequence, limits))
        if limits.audio is not None:
            plan.encoded = [_encoded(sequence.columns, limits.audio) for sequence in sequences if sequence.columns]
        keys = [entry.key for entry in plan.encoded]
        plans.append(plan)
    if limits.pooling is None and limits.length > 1:
        plans += _continued(limits, names, keys)
        names, keys = ["warm-up-0"], []
    plans.append(StepPlan(removed=names, evicted=keys))
    return plans


def _continued(limits: WarmUpLimits, names: list[str], keys: list[bytes]) -> list[StepPlan]:
    """Two steps of a sequence, of which the second reads a token that the host does not know yet.

    `names`, `keys`: what the first one removes.
    """
    sequence = _Sequence(1)
    first = StepPlan(removed=names, evicted=keys, new=[_new("warm-up-0", sequence, limits, encodes=False)])
    first.scheduled.append(_scheduled("warm-up-0", sequence, limits))
    blocks = limits.new_blocks(1, 2) if limits.block_size == 1 else ()
    return [first, StepPlan(scheduled=[ScheduledSequence("warm-up-0", 1, 1, blocks, samples=True)])]


def encoder_plans(tokens: int, context_len: int, params: PoolingParams) -> list[StepPlan]:
    """The steps of an encoder of text. `tokens`: most tokens of a step; `context_len`: of a request."""
    plans = []
    for total in _powers(tokens):
        lengths = _divided(total, context_len)
        prompts = [np.zeros(length, np.int32) for length in lengths]
        requests = [AddRequest(f"warm-up-{index}", prompt, params) for index, prompt in enumerate(prompts)]
        plans.append(StepPlan(encoder_requests=requests))
    return plans


def audio_encoder_plans(tokens: int, speech: Transcribes) -> list[StepPlan]:
    """The steps of an encoder of audio with one item, up to the longest. `tokens`: most positions of a step."""
    params, prompt = PoolingParams(task="ctc"), np.zeros(0, np.int32)
    items = [_item(speech, positions) for positions in _powers(min(tokens, speech.num_positions))]
    return [StepPlan(encoder_requests=[AddRequest("warm-up", prompt, params, items=(item,))]) for item in items]


def _item(speech: Transcribes, positions: int) -> AudioItem:
    """Silence with so many positions after the encoder."""
    columns = min(count_columns(speech.convolutions, positions), speech.num_columns)
    return AudioItem(hash=b"", features=np.zeros((speech.num_mel_bins, columns), np.float32))


def _encoded(columns: int, audio: AudioInfo) -> EncodedItem:
    """Silence with so many columns of features."""
    features = np.zeros((audio.num_mel_bins, columns + audio.columns_after), np.float32)
    item = AudioItem(hash=b"0", length=audio.lengths.tokens(columns), features=features, encoded_columns=columns)
    return EncodedItem(_key(columns), item)


def smallest_picture(geometry: Geometry) -> PictureItem:
    """A black picture of few tokens. Their number is not right: it is for encoders only, which do not read it."""
    images, original = 1, None
    match geometry:
        case SmartResize():
            height = width = 2 * geometry.multiple
        case PatchRows() | PatchBudget():
            height = width = 2 * geometry.patch
        case TokenBudget():
            height = width = 2 * geometry.multiple
        case SplitTiles() | CanvasTiles():
            height = width = geometry.tile
        case AnyResolution():
            height = width = geometry.tile
            original = geometry.canvases[0]
            images += original[0] * original[1] // geometry.tile**2
        case PaddedTiles():
            height = width = geometry.tile
            original = height, width
        case TransformersProcessor():
            raise TypeError("only the model's processor makes pictures for it")
        case _:
            height, width = geometry.height, geometry.width
    pixels = np.zeros((images, height, width, 3), np.uint8)
    return PictureItem(hash=b"", length=2, pixels=pixels, original_size=original)


@torch.inference_mode()
def warm_up_vision(loaded: LoadedModel) -> None:
    """Compile the kernels that encode pictures, if the model, or the part that a rank has, reads any."""
    vision = vision_of(loaded)
    if vision is not None:
        assert loaded.pictures is not None
        vision.encode(vision.largest or smallest_picture(loaded.pictures.info.geometry))


def _key(columns: int) -> bytes:
    return b"warm-up-%d" % columns


def _steps(limits: WarmUpLimits) -> Iterator[list[_Sequence]]:
    longest, pooling = limits.length, limits.pooling
    base = _Sequence(1) if pooling is None else _Sequence(1, params=pooling)
    base = replace(base, bidirectional=limits.is_prefix_lm)
    for lora_id in (None,) if limits.lora_id is None else (None, limits.lora_id):
        sequence = replace(base, lora_id=lora_id)
        for tokens in _powers(limits.tokens):
            yield [replace(sequence, length=length) for length in _divided(tokens, longest)]
        for rows in _powers(limits.sequences):
            yield [replace(sequence, length=min(2, longest))] * rows
            if pooling is None:
                yield [replace(sequence, length=2, start=1, generated=True)] * rows
    if limits.has_bidirectional_pictures:
        for tokens in _powers(limits.tokens):
            yield [replace(base, length=length, bidirectional=True) for length in _divided(tokens, longest)]
    for length in _powers(longest):
        last = replace(base, length=length, start=length - 1)
        yield [last, replace(last, generated=True)] if pooling is None and length > 1 else [last]
    if pooling is None:
        yield from _sampling_steps(limits)
    if limits.audio is not None:
        yield from _audio_steps(limits, limits.audio)


def _audio_steps(limits: WarmUpLimits, audio: AudioInfo) -> Iterator[list[_Sequence]]:
    """Steps that encode audio, and read as many of its embeddings as fit into a step."""
    for columns in [audio.item_columns] if audio.encodes_padding else _powers(audio.item_columns):
        length = min(audio.lengths.tokens(columns), limits.tokens, limits.length)
        if length > 0:
            yield [_Sequence(length, columns=columns, lora_id=limits.lora_id)]


def _sampling_steps(limits: WarmUpLimits) -> Iterator[list[_Sequence]]:
    """Steps whose sequences are sampled in different ways, or need more than one row of logits."""
    sampled = [_Sequence(2, 1, generated=True, params=params) for params in _kinds_of_sampling(limits.vocab_size)]
    yield from ([sequence] for sequence in sampled)
    yield sampled
    for tokens in _powers(min(LOGITS_CHUNK, limits.tokens, limits.length)):
        yield [_Sequence(tokens, prompt_logprobs=1, bidirectional=limits.is_prefix_lm)]
    if limits.draft:
        for rows in _powers(limits.sequences):
            yield [_Sequence(2, 1, generated=True, draft=limits.draft)] * rows
        yield [replace(sequence, draft=limits.draft) for sequence in sampled]


def _kinds_of_sampling(vocab_size: int) -> list[SamplingParams]:
    """Parameters of which each needs other kernels, or other variants of them."""
    allowed = token_mask(np.zeros(1, np.int32), vocab_size)
    return [
        SamplingParams(max_tokens=1, seed=0),
        SamplingParams(max_tokens=1, seed=0, min_p=0.1),
        SamplingParams(max_tokens=1, seed=0, top_k=2),
        SamplingParams(max_tokens=1, seed=0, top_p=0.9),
        SamplingParams(max_tokens=1, temperature=0, presence_penalty=1.0),
        SamplingParams(max_tokens=1, temperature=0, logit_bias={0: 1.0}),
        SamplingParams(max_tokens=1, temperature=0, allowed_tokens=allowed),
        SamplingParams(max_tokens=1, temperature=0, logprobs=0),
        SamplingParams(max_tokens=1, temperature=0, logprobs=2),
    ]


def _powers(most: int) -> list[int]:
    """Powers of two up to a number, and that number."""
    return sorted({*(1 << power for power in range(most.bit_length())), most}) if most > 0 else []


def _divided(tokens: int, longest: int) -> list[int]:
    """Tokens divided among sequences."""
    full, remainder = divmod(tokens, longest)
    return [longest] * full + [remainder] * (remainder > 0)


def _fitting(step: list[_Sequence], limits: WarmUpLimits) -> list[_Sequence]:
    """The sequences of a step that an engine with these limits can compute."""
    fitting, left = list[_Sequence](), limits.tokens
    for sequence in step:
        if (
            sequence.count <= left
            and sequence.length + sequence.draft <= limits.length
            and len(fitting) < limits.sequences
            and (not sequence.draft or sum(bool(other.draft) for other in fitting) < limits.drafting)
        ):
            fitting.append(sequence)
            left -= sequence.count
    return fitting


def _new(name: str, sequence: _Sequence, limits: WarmUpLimits, *, encodes: bool) -> NewSequence:
    """The sequence as it enters the batch. `encodes`: it encodes the item that it attends to, if there is one."""
    cross, speech = None, limits.kind
    if isinstance(speech, Transcribes):
        blocks = tuple(range(limits.num_blocks - limits.cross_blocks, limits.num_blocks))
        item = _item(speech, speech.num_positions) if encodes else None
        cross = CrossAttentionItem(blocks, speech.num_positions, item)
    return NewSequence(
        request_id=name,
        tokens=np.zeros(sequence.length, np.int32),
        prompt_len=sequence.start if sequence.generated else sequence.length,
        params=sequence.params,
        prompt_logprobs=sequence.prompt_logprobs,
        cross_attention=cross,
        lora_id=sequence.lora_id,
    )


def _scheduled(name: str, sequence: _Sequence, limits: WarmUpLimits) -> ScheduledSequence:
    """All sequences have the same blocks: what they write is not used."""
    blocks = limits.new_blocks(0, -(-(sequence.length + sequence.draft) // limits.block_size))
    samples = isinstance(sequence.params, SamplingParams)
    items = (PlaceholderTokens(_key(sequence.columns), 0, 0, sequence.count),) if sequence.columns else ()
    draft = (0,) * sequence.draft
    # The kernels are those of pictures as well, whose tokens do not ignore windows.
    span = BidirectionalSpan(0, sequence.length, ignores_windows=limits.is_prefix_lm)
    spans = (span,) if sequence.bidirectional and not sequence.generated else ()
    return ScheduledSequence(name, sequence.start, sequence.count, blocks, samples, draft, items, spans)
