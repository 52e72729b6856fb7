"""The positions of a sequence that each rank has.

Context-parallel ranks share a sequence, and attention on each of them computes for its positions.
Tensor-parallel ranks share these once more between the layers.

Shape symbols: B sequences, S positions of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import hp_context
from hp_context import (
    Contiguous,
    Deal,
    Documents,
    HeadTail,
    Mask,
    SequenceLayout,
    local_positions,
    shard_sequence,
)
from hp_trainer.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """The positions of one rank.

    Attributes:
        mesh: Mesh of the run.
        layout: How context-parallel ranks share a sequence.
        attended: Positions that attention sees here, int64 [S / cp].
        between: Positions that are here between layers, int64 [S / cp / tp].
    """

    mesh: Mesh
    layout: SequenceLayout
    attended: Tensor
    between: Tensor

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        *,
        seq_len: int,
        gathers_keys: bool,
        device: torch.device,
        splits_positions: bool = True,
    ) -> "SequenceShare":
        """Share out a sequence.

        Args:
            mesh: Mesh of the run.
            seq_len: Length of whole sequences, S.
            gathers_keys: Whether context-parallel ranks compute for their own queries alone, and
                so need equal shares of early and late ones. Of a length that does not come in such
                shares, as sequences that are dealt out may have, each takes a run of positions.
            device: Device of the positions.
            splits_positions: Whether tensor-parallel ranks share positions between layers.
        """
        has_halves = seq_len % (2 * mesh.size("cp")) == 0
        layout = HeadTail() if gathers_keys and has_halves else Contiguous()
        attended = local_positions(seq_len, mesh.groups["cp"], layout=layout, device=device)
        if not splits_positions:
            return cls(mesh, layout, attended, attended)
        between = attended.chunk(mesh.size("tp"))[mesh.index("tp")]
        return cls(mesh, layout, attended, between)

    def dealt(
        self, lengths: Sequence[int], *, windows: Sequence[int | None], heads: int
    ) -> "SequenceShare":
        """Return the positions of a rank in a sequence whose documents are dealt out by work.

        Args:
            lengths: Tokens of its documents.
            windows: How many keys before its own a query sees, for each layer; None: all.
            heads: Ranks that share heads.
        """
        ranks = self.mesh.groups["cp"].size()
        return self.of_deal(hp_context.deal_documents(lengths, ranks, windows=windows, heads=heads))

    def of_deal(self, deal: Deal) -> "SequenceShare":
        """Return the positions of one rank of a sequence that is dealt out, of any length."""
        group, device = self.mesh.groups["cp"], self.attended.device
        attended = local_positions(deal.seq_len, group, layout=deal, device=device)
        between = attended.chunk(self.mesh.size("tp"))[self.mesh.index("tp")]
        return SequenceShare(self.mesh, deal, attended, between)

    def limits(self, lengths: Sequence[int]) -> Mask:
        """Return what limits attention of a sequence of documents, and where its positions are."""
        documents = Documents(tuple(lengths))
        if self.mesh.size("cp") > 1 and isinstance(self.layout, Deal):
            return documents & self.layout
        return documents

    def shard(self, x: Tensor) -> Tensor:
        """Take what attention sees here out of whole sequences [B, S]."""
        return shard_sequence(x, self.mesh.groups["cp"], layout=self.layout)

    def place(self, position: int) -> int | None:
        """Return where a position is among those that attention sees here, if it is."""
        found = (self.attended == position).nonzero()
        return int(found[0]) if len(found) else None
