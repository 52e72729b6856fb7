"""Checkpoints of plain `torch.distributed.checkpoint`: read without unpickling, and written.

torch reads its own with `pickle`, which runs whatever a file tells it to, and does not notice a
flipped bit. Here `pickled` interprets the few instructions that torch writes and knows no others,
`metadata` checks what they describe, `tensors` reads the values with their checksums, `sources` and
`planner` give them to a save of either kind.
"""

from hp_checkpoint.dcp.planner import write_sources
from hp_checkpoint.dcp.sources import read_sources, sources_in

__all__ = ["read_sources", "sources_in", "write_sources"]
