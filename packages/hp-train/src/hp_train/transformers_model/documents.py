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


def positions_of(model: Any, microbatch: Microbatch, x: Tensor) -> dict[str, Tensor]:
    """Arguments of a model that say where documents begin; none where there are none.

    Positions begin with 0 in every document: so transformers knows packed sequences, and keeps
    documents apart by its masks.

    Args:
        model: Model of transformers.
        microbatch: Says where documents end.
        x: What the model gets, [B, S, ...].

    Raises:
        hp_train.errors.ConfigError: When the model takes no positions.
    """
    if microbatch.documents is None:
        return {}
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f'data.documents ("separate") must be "joined" with {type(model).__name__}, which takes '
            "no positions and so knows no documents"
        )
    rows = []
    for documents in microbatch.documents:
        assert isinstance(documents, Documents)
        rows.append(torch.cat([torch.arange(length) for length in documents.lengths]))
    return {"position_ids": torch.stack(rows).to(x.device)}
