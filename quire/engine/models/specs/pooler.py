"""PoolerSpec: how a model turns hidden states into embeddings, labels or scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.client.model_info import Pools
from quire.engine.client.pooling_params import PoolingTask, PoolingType
from quire.engine.models.specs.decoder import LayerNormSpec

ScoreMethod = Literal["cosine", "dot", "cross_encoder", "max_sim"]
LabelActivation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """act(x W^T + b); `size_in` 0: that of the hidden states."""

    size_in: int
    size_out: int
    act: str = "linear"
    bias: bool = True


HeadStep = Dense | LayerNormSpec


@dataclass(frozen=True, kw_only=True)
class SparseHead:
    """A masked language model's head, which gives a value for each token of the vocabulary.

    Attributes:
        dense, norm: steps before the output projection; None for none.
        bias: the output projection has a bias.
        tied: the output projection shares the embedding's weight.
        pooling: the values of all positions are summed, or the largest is taken.
        log_twice: values become log(1 + x) twice.
    """

    dense: Dense | None
    norm: LayerNormSpec | None
    bias: bool
    tied: bool = True
    pooling: Literal["max", "sum"] = "max"
    log_twice: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolerSpec:
    """How a model turns hidden states into embeddings, labels or scores.

    Attributes:
        tasks: pooling tasks, the first one is the default.
        pooling_type: how token hidden states are pooled for "embed", "classify" and "score".
        embed: steps from the pooled hidden state to an embedding.
        normalize: embeddings have length 1.
        token_embed: steps from every hidden state to the embedding of a token.
        classify: steps to the logits of labels.
        labels: names of the labels.
        label_act: makes probabilities of logits; None: none.
        score_method: the method by which two texts are compared.
        matryoshka: embeddings may be cut; dimensions: to one of these, or to any if there are none.
        sparse_head: head of sparse embeddings (SPLADE); None: embeddings are dense.
        label_tokens: the weight of `classify` are the rows of these tokens in the output projection.
        classify_tokens: `classify` is computed for every token, and the mean of the logits is taken (EuroBERT).
        subtract_labels: the score is the difference of the last label's and the first one's logits.
        default_dimensions: values of an embedding that a request gets if it does not say; None: all.
        chunked: texts beyond the context length are embedded in chunks; only the front end reads it.
        max_embed_len: tokens of the longest text; None: the context length, or no limit with `chunked`.
        logit_mean, logit_sigma: logits of labels become (logits - mean) / sigma.
        step_tag: results of tokens are those of this token only; None: of all.
        padded_to: texts are padded to so many tokens; 0: they are not; only the front end reads it.
        extra_weights: files in the model's folder with weights of the steps: (step, folder).
    """

    tasks: tuple[PoolingTask, ...]
    pooling_type: PoolingType = "last"
    embed: tuple[HeadStep, ...] = ()
    normalize: bool = True
    token_embed: tuple[HeadStep, ...] = ()
    classify: tuple[HeadStep, ...] = ()
    labels: tuple[str, ...] = ()
    label_act: LabelActivation = "softmax"
    score_method: ScoreMethod | None = None
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    sparse_head: SparseHead | None = None
    label_tokens: tuple[int, ...] = ()
    classify_tokens: bool = False
    subtract_labels: bool = False
    default_dimensions: int | None = None
    chunked: bool = False
    max_embed_len: int | None = None
    logit_mean: float = 0.0
    logit_sigma: float = 1.0
    step_tag: int | None = None
    padded_to: int = 0
    extra_weights: tuple[tuple[str, str], ...] = ()

    @property
    def acts(self) -> set[str]:
        """The activations of all heads."""
        steps = [*self.embed, *self.token_embed, *self.classify]
        if self.sparse_head is not None and self.sparse_head.dense is not None:
            steps.append(self.sparse_head.dense)
        return {step.act for step in steps if isinstance(step, Dense)}

    def facts(self, hidden: int, vocab: int) -> Pools:
        """Return facts about the model. `hidden`: elements of its hidden states; `vocab`: size of its vocabulary."""

        def size(steps: Sequence[HeadStep]) -> int:
            return next((step.size_out for step in reversed(steps) if isinstance(step, Dense)), hidden)

        return Pools(
            tasks=self.tasks,
            pooling_type=self.pooling_type,
            embedding_size=size(self.embed) if self.sparse_head is None else vocab,
            token_embedding_size=size(self.token_embed),
            matryoshka=self.matryoshka,
            dimensions=self.dimensions,
            labels=self.labels,
            score_method=self.score_method,
            sparse=self.sparse_head is not None,
            chunked=self.chunked,
            max_embed_len=self.max_embed_len,
            padded_to=self.padded_to,
        )


@dataclass(frozen=True, kw_only=True)
class HeadReaders:
    """How the configs of a family describe heads; None: models have no such head, or none but the last linear layer.

    Attributes:
        labels: the steps before the labels of a text; they read the state of the first token, or the mean.
        token_labels: the steps before the labels of each token.
        masked_lm: the head of a masked language model, from which sparse embeddings are made (SPLADE).
    """

    labels: Callable[[Any], tuple[HeadStep, ...]] | None = None
    token_labels: Callable[[Any], tuple[HeadStep, ...]] | None = None
    masked_lm: Callable[[Any], SparseHead] | None = None


NO_HEADS = HeadReaders()
