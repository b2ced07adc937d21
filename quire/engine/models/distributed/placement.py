"""Placement: the position of a rank among those that run a model together."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.options import ParallelOptions


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of a rank. Ranks of a pipeline stage are numbered consecutively.

    Attributes:
        rank: index among all ranks. Rank 0 is the core's: it plans and samples.
        tensor_size: ranks that share each layer (tensor parallelism).
        stages: groups of ranks that have different layers (pipeline parallelism).
        expert_parallel: experts are divided among the ranks of a stage as a whole, instead of each being cut.
    """

    rank: int = 0
    tensor_size: int = 1
    stages: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, options: ParallelOptions, rank: int = 0) -> Placement:
        """The placement of a rank."""
        return cls(rank, options.tensor_parallel_size, options.pipeline_parallel_size, options.enable_expert_parallel)

    @staticmethod
    def of_node(options: ParallelOptions, node: int) -> range:
        """The ranks of a node: as many consecutive ones as each node has."""
        return range(node * options.local_ranks, (node + 1) * options.local_ranks)

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.tensor_size * self.stages

    @property
    def tensor_rank(self) -> int:
        """Index among the ranks of the stage."""
        return self.rank % self.tensor_size

    @property
    def stage(self) -> int:
        """Index of the stage."""
        return self.rank // self.tensor_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has the output projection."""
        return self.stage == self.stages - 1

    @property
    def previous(self) -> int:
        """The rank that this one receives hidden states from."""
        return self.rank - self.tensor_size

    @property
    def next(self) -> int:
        """The rank that this one sends hidden states to."""
        return self.rank + self.tensor_size

    @property
    def logits_rank(self) -> int:
        """The rank that gathers the logits."""
        return (self.stages - 1) * self.tensor_size
