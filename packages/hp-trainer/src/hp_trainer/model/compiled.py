"""The parts of blocks that `torch.compile` runs.

Attention and feed-forward of a block, each with its norm, are a region of their own. What is around
them stays as it is: dropout and balancing loss read what travels with the call, which changes in
every step, and a region that runs again in backward is wrapped from outside. Inside a region graphs
are cut where something is not to be compiled: at attention proper, whose masks, exchanges and
kernels are hp-context's; between the choice of experts and the sum of their outputs, which is
hp-expert's; and where tensor-parallel ranks gather and scatter positions. What the graphs see keeps
its shape, however many tokens an expert gets and wherever documents end; only whether there are
documents at all makes two versions of those around attention.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from hp_trainer.model.block import Block
from hp_trainer.model.stage import Stage

Compiler = Literal["none", "inductor", "aot_eager"]
"""What compiles; torch's names of backends."""


class CompileCost(NamedTuple):
    """The time that compilers have cost this process.

    Attributes:
        seconds: Seconds in torch.compile, tracing and generating code included.
        graphs: Number of graphs compiled.
    """

    seconds: float = 0.0
    graphs: int = 0

    @classmethod
    def so_far(cls) -> "CompileCost":
        """Return cost since the process started; imports the compiler, which takes seconds once."""
        from torch._dynamo import utils  # noqa: PLC0415

        seconds = utils.calculate_time_spent()["total_wall_time"]
        return cls(seconds, utils.counters["stats"]["unique_graphs"])

    def since(self, before: "CompileCost") -> "CompileCost":
        """Return the cost beyond an earlier one."""
        return CompileCost(self.seconds - before.seconds, self.graphs - before.graphs)


def compile_blocks(stage: Stage, compiler: Compiler | Callable[..., Any]) -> None:
    """Let a compiler run attention and feed-forward of every block, or a block of one's own whole.

    Each kind of block is compiled once, not each block: they share graphs where they are equal.

    Args:
        stage: Cut and sharded already; changed in place.
        compiler: Also a backend of one's own, as `torch.compile` takes it.
    """
    if compiler == "none":
        return
    for block in stage.blocks:
        if isinstance(block, Block):
            block.attend = torch.compile(block.attend, backend=compiler)
            block.feed = torch.compile(block.feed, backend=compiler)
        else:
            block.compile(backend=compiler)
