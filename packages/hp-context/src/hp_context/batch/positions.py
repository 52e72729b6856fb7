"""Position ids that count anew in each document, of whole sequences and of their parts.

Shape symbols: B sequences of a batch, S whole sequence, N ranks, s = S / N.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context.batch import SequenceLayout, unshard_sequence
from hp_context.checks import compare
from hp_context.masks import Documents


def documents_of(position_ids: Tensor) -> Documents:
    """Return the documents of one packed sequence.

    Args:
        position_ids: int [S] or [1, S]: 0, 1, 2, ... in each document.

    Raises:
        ValueError: They count otherwise, or are of several sequences.

    Example:
        >>> documents_of(torch.tensor([0, 1, 2, 0, 1])).lengths
        (3, 2)
    """
    rows = position_ids.unsqueeze(0) if position_ids.ndim == 1 else position_ids
    if rows.ndim != 2 or len(rows) != 1:
        raise ValueError(f"position_ids ({tuple(position_ids.shape)}) must be [S] or [1, S]")
    return documents_of_rows(rows)[0]


def documents_of_rows(position_ids: Tensor, *, order: str = "") -> list[Documents]:
    """Return the documents of each sequence; see `documents_of`.

    Args:
        position_ids: int [B, S].
        order: Name of the layout that put them into this order, for the message.

    Raises:
        ValueError: They do not count up by one from 0 in each document.
    """
    rows = position_ids.cpu()  # one copy, instead of a wait for each question
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1] + 1
    wrong = (begins & (rows != 0)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        before = f"after {int(rows[row, place - 1])} " if place else ""
        raise ValueError(
            f"position_ids ({int(rows[row, place])} {before}at global position {place}) must count "
            f"up by 1 from 0 in each document{order}"
        )
    end = torch.tensor([rows.size(1)])
    return [
        Documents(tuple(torch.diff(row.nonzero().flatten(), append=end).tolist())) for row in begins
    ]


def gather_position_ids(
    position_ids: Tensor | None,
    *,
    error: Exception | None,
    same: Mapping[str, object],
    device: torch.device,
    layout: SequenceLayout,
    group: ProcessGroup,
) -> Tensor | None:
    """Return the position ids of the whole sequence, or raise on all ranks.

    Costs an all-gather of a few numbers and one of the positions, both read on the host.

    Args:
        position_ids: int [B, s] of this rank; None if it has none.
        error: Error of this rank; None if all is well.
        same: Further facts that must be equal on all ranks: see `compare`.
        device: Device on which the ranks communicate.
        layout: Positions of each rank.
        group: The ranks that share the sequence; all of them call.

    Returns:
        int64 [B, S] on the CPU, in the order of positions; None if the ranks have none.

    Raises:
        Exception: `error`.
        ValueError: Ranks differ in what must be equal, or in the shape of their positions; the
            message names them.
        PeerError: Another rank has an error.
    """
    shape = None if position_ids is None else tuple(position_ids.shape)
    facts = {**same, "shapes of position_ids": shape}
    compare(error, facts, group=group, device=device)
    if position_ids is None:
        return None
    return unshard_sequence(position_ids.to(device, torch.int64), group, layout=layout).cpu()
