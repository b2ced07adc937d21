"""Runners of encoders of text, pictures and audio, whose requests are computed in one step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.client.pooling_params import PoolingParams
from quire.engine.client.protocol import AddRequest, PictureItem, PooledArray
from quire.engine.execution.attention.varlen import VarlenAttention
from quire.engine.execution.item_encoder import embed_items
from quire.engine.execution.pooling import Pooler, add_pooled
from quire.engine.models.layers.inputs import ModelInputs
from quire.engine.models.networks.audio_encoder import CTCModel
from quire.engine.models.networks.dual_encoder import DualEncoder
from quire.engine.models.networks.encoder import TextEncoder
from quire.engine.scheduling.plan import SequenceError, StepPlan, StepResult

logger = logging.getLogger(__name__)


class PackedRunner(ABC):
    """Run a model over the requests of a step, concatenated without padding.

    It has no state, so several threads may run steps at once.
    """

    @abstractmethod
    def _compute(self, requests: Sequence[AddRequest]) -> Iterator[tuple[AddRequest, PooledArray]]:
        """The result of each request."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        result = StepResult()
        if not plan.encoder_requests:
            return result
        try:
            self._run(plan.encoder_requests, result)
        except Exception:  # error boundary: only the requests for which it fails alone end
            logger.exception("a step failed; its requests are computed one by one")
            for request in plan.encoder_requests:
                if request.request_id not in result.pooled and request.request_id not in result.errors:
                    self._run_alone(request, result)
        return result

    def check(self) -> None:  # noqa: B027 (not abstract: no runner of encoders keeps state)
        """Do nothing: there is no state between steps."""

    def close(self) -> None:  # noqa: B027 (as for check)
        """Do nothing: there is nothing to release."""

    def _run_alone(self, request: AddRequest, result: StepResult) -> None:
        try:
            self._run([request], result)
        except Exception as error:  # error boundary: only this request fails
            logger.exception("the model failed for request %s", request.request_id)
            result.errors[request.request_id] = SequenceError(f"the model failed: {type(error).__name__}: {error}")

    def _run(self, requests: Sequence[AddRequest], result: StepResult) -> None:
        for request, array in self._compute(requests):
            add_pooled(result, request.request_id, array)


class EncoderRunner(PackedRunner):
    """Run an encoder of text, and its pooler."""

    def __init__(self, model: TextEncoder, pooler: Pooler, device: torch.device) -> None:
        """`device`: that of the model."""
        self.model = model
        self._pooler = pooler
        self._device = device

    def _compute(self, requests: Sequence[AddRequest]) -> Iterator[tuple[AddRequest, PooledArray]]:
        lengths = [len(request.prompt) for request in requests]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        inputs = _inputs(requests, offsets, self.model, self._device)
        assert inputs.cu_seqlens is not None
        encoded = self.model.encode(inputs, VarlenAttention(inputs.cu_seqlens))
        for request, hidden in zip(requests, encoded, strict=True):
            yield request, self._pool(hidden, request)

    def _pool(self, hidden: Tensor, request: AddRequest) -> PooledArray:
        params = request.params
        assert isinstance(params, PoolingParams)
        state = self._pooler.start(params)
        skipped = params.skip_tokens
        state.add(self._pooler.steps(hidden[skipped:], request.prompt[skipped:], params))
        return self._pooler.finish(state, params)


class DualEncoderRunner(PackedRunner):
    """Run an encoder of texts and one of pictures."""

    def __init__(self, model: DualEncoder, pooler: Pooler, device: torch.device) -> None:
        """`device`: that of the model."""
        self.model = model
        self._pooler = pooler
        self._device = device

    def _compute(self, requests: Sequence[AddRequest]) -> Iterator[tuple[AddRequest, PooledArray]]:
        """Texts of equal length run together, pictures one by one."""
        by_length: dict[int, list[AddRequest]] = {}
        for request in requests:
            pictures = [item for item in request.items if isinstance(item, PictureItem)]
            if pictures:
                yield request, self._pool(self.model.encode_picture(pictures[0]), request)
            else:
                by_length.setdefault(len(request.prompt), []).append(request)
        for texts in by_length.values():
            tokens = torch.from_numpy(np.stack([request.prompt for request in texts])).long().to(self._device)
            for request, embedding in zip(texts, self.model.encode_texts(tokens), strict=True):
                yield request, self._pool(embedding[None], request)

    def _pool(self, embedding: Tensor, request: AddRequest) -> PooledArray:
        params = request.params
        assert isinstance(params, PoolingParams)
        state = self._pooler.start(params)
        state.add(embedding)
        return self._pooler.finish(state, params)


class CTCRunner(PackedRunner):
    """Run an encoder of audio with a projection to the logits of each position."""

    def __init__(self, model: CTCModel) -> None:
        self.model = model

    def _compute(self, requests: Sequence[AddRequest]) -> Iterator[tuple[AddRequest, PooledArray]]:
        embedded, offsets = embed_items(self.model.encoder, [request.audio_items[0] for request in requests])
        logits = self.model.run(embedded, VarlenAttention(offsets), offsets)
        for request, part in zip(requests, logits, strict=True):
            tokens = part.argmax(-1, keepdim=True)
            logprobs = part.log_softmax(-1).gather(1, tokens)
            yield request, torch.cat((tokens.float(), logprobs), 1).cpu().numpy()


def _inputs(
    requests: Sequence[AddRequest], offsets: NDArray[np.int64], model: TextEncoder, device: torch.device
) -> ModelInputs:
    tokens = np.concatenate([request.prompt for request in requests]).astype(np.int64)
    positions = np.arange(len(tokens), dtype=np.int64) - np.repeat(offsets[:-1], np.diff(offsets))
    type_ids = None
    if model.token_types > 1 and any(request.second_text_start is not None for request in requests):
        starts = [
            end if r.second_text_start is None else r.second_text_start
            for r, end in zip(requests, offsets[1:], strict=True)
        ]
        ends = [
            end if r.second_text_end is None else r.second_text_end
            for r, end in zip(requests, offsets[1:], strict=True)
        ]
        lengths = np.diff(offsets)
        is_second = (positions >= np.repeat(starts, lengths)) & (positions < np.repeat(ends, lengths))
        type_ids = torch.from_numpy(is_second.astype(np.int64))
    return ModelInputs(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(positions).to(device),
        type_ids=None if type_ids is None else type_ids.to(device),
        cu_seqlens=torch.from_numpy(offsets),
    )
