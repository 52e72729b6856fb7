"""Documents of a packed sequence, as models of transformers are told of them.

Shape symbols: B sequences, S positions.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from hp_context import Documents
from hp_train.errors import ConfigError
from hp_train.model import Microbatch


def positions_of(
    model: Any, microbatch: Microbatch, x: Tensor, *, is_shared: bool
) -> dict[str, Tensor]:
    """Arguments of a model that say where its tokens are; none where it knows by itself.

    Positions begin with 0 in every document: so transformers knows packed sequences, and keeps
    documents apart by its masks.

    Args:
        model: Model of transformers.
        microbatch: Says where documents end.
        x: What the model gets, [B, S, ...].
        is_shared: Whether ranks have other positions of the sequences.

    Raises:
        hp_train.errors.ConfigError: When the model takes no positions.
    """
    if microbatch.documents is None and not is_shared:
        return {}
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        must = "mesh.cp must be 1" if is_shared else 'data.documents must be "joined"'
        raise ConfigError(f"{must} with {type(model).__name__}, which takes no positions")
    positions = microbatch.positions if is_shared else None
    if microbatch.documents is None:
        assert positions is not None
        return {"position_ids": positions[None]}
    rows = []
    for documents in microbatch.documents:
        assert isinstance(documents, Documents)
        rows.append(torch.cat([torch.arange(length) for length in documents.lengths]))
    whole = torch.stack(rows).to(x.device)
    return {"position_ids": whole if positions is None else whole[:, positions]}
