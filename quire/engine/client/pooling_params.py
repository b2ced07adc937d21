"""PoolingParams: parameters of a request that pools hidden states."""

from __future__ import annotations

from typing import Literal

import msgspec

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify", "align", "ctc"]
PoolingType = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean"]


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pool"):
    """Parameters of a request that turns the last layer's hidden states of a prompt into one array of float32.

    Attributes:
        task: "embed" gives (size,), "token_embed" (tokens, size), "classify" (labels,), "token_classify"
            (tokens, labels), "score" (1,). "align" gives (tokens - skip_tokens, num_positions): how strongly each
            token of a transcription belongs to each encoded position of its audio. "ctc" gives (positions, 2): the most
            likely token at each encoded position, and its log-probability; the prompt is empty then.
        pooling_type: how token hidden states are pooled, for tasks on whole texts; None for the
            model's own, which the core fills in.
        dimensions: number of values of an embedding to keep, the first ones.
        use_activation: normalize embeddings to length 1; apply softmax or sigmoid to labels and scores. None: as the
            model's files say.
        skip_tokens: number of tokens at the start that are not part of the mean or the alignment.
        num_positions: for "align": number of encoder positions that hold audio, the first ones; None: all.
    """

    task: PoolingTask
    pooling_type: PoolingType | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    skip_tokens: int = 0
    num_positions: int | None = None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether tokens that the prefix cache holds must be computed nevertheless, for their hidden states."""
        return self.task.startswith("token_") or self.task == "align" or self.pooling_type != "last"
