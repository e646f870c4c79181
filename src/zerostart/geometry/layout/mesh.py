"""Who shares what: the ranks of a world as a mesh, in integers alone.

Tensor-parallel ranks are neighbours, and see one batch. Expert-parallel ranks are neighbours too, and each
sees a batch of its own. The ranks that hold the same section of a parameter share it: its *owners*.

    world 8, tensor 2, expert 1:  owners of a cut weight  {0 2 4 6} {1 3 5 7}
    world 8, expert 4:            owners of an expert     {0 4} {1 5} {2 6} {3 7}

With both, each divides the world in its own way: experts are cut by experts alone, over all ranks, and the
rest by tensors. Tensor-parallel ranks send the same tokens to the experts, each for itself.

Sequence-parallel ranks are neighbours that see one batch, of which each has a part of every sequence. They
cut no parameter: all ranks share each as if every one had a batch of its own. With tensors, the ranks that
share those have one part of a sequence, and the neighbours are every so many ranks.

    world 4, sequence 2:            batches of  {0 1} {2 3}, parts of it  {0 2} {1 3}
    world 8, sequence 2, tensor 2:  batches of  {0 1 2 3} {4 5 6 7}, parts of it  {0 1 4 5} {2 3 6 7}
"""

from __future__ import annotations

from dataclasses import dataclass

from zerostart.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """``world_size`` ranks; ``expert_parallel`` of them share experts, ``tensor_parallel`` share tensors.

    ``sequence_parallel`` of them share each sequence.
    """

    world_size: int
    expert_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("expert_parallel", "tensor_parallel", "sequence_parallel"):
            size = getattr(self, name)
            if size < 1:
                raise ConfigError(f"{name}={size} must be at least 1")
            if self.world_size % size:
                fitting = [n for n in range(1, self.world_size + 1) if self.world_size % n == 0]
                raise ConfigError(
                    f"{name}={size} does not divide the {self.world_size} ranks; use one of "
                    f"{', '.join(map(str, fitting[-8:]))}, or another number of ranks"
                )
        shared = self.tensor_parallel * self.sequence_parallel
        if self.world_size % shared:
            raise ConfigError(
                f"tensor_parallel={self.tensor_parallel} with sequence_parallel={self.sequence_parallel} "
                f"needs {shared} ranks for each batch, which does not divide the {self.world_size} ranks; "
                "use fewer for one of them"
            )

    @property
    def parallel(self) -> bool:
        """Whether any parameter is cut before the engine shards it."""
        return self.expert_parallel > 1 or self.tensor_parallel > 1

    def tensor(self, rank: int) -> tuple[int, int]:
        """Rank and size in the tensor-parallel group."""
        return rank % self.tensor_parallel, self.tensor_parallel

    def data(self, rank: int) -> tuple[int, int]:
        """Rank and size among those that hold one section of a dense parameter; each has its own batch."""
        return rank // self.tensor_parallel, self.world_size // self.tensor_parallel

    def sequence(self, rank: int) -> tuple[int, int]:
        """Rank and size among those that share each sequence of a batch."""
        return rank // self.tensor_parallel % self.sequence_parallel, self.sequence_parallel

    def batch(self, rank: int) -> tuple[int, int]:
        """Which batch a rank sees, and how many there are at a time."""
        shared = self.sequence_parallel * self.tensor_parallel
        return rank // shared, self.world_size // shared

    def expert(self, rank: int) -> tuple[int, int]:
        """Rank and size in the expert-parallel group."""
        return rank % self.expert_parallel, self.expert_parallel

    def expert_data(self, rank: int) -> tuple[int, int]:
        """Rank and size among those that hold the same experts."""
        return rank // self.expert_parallel, self.world_size // self.expert_parallel
