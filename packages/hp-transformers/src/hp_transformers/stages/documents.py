"""Documents of a packed sequence, as models of transformers learn of them.

Shape symbols: B sequences, S positions.
"""

import inspect
import re
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor, nn

from hp_base.errors import ConfigError, told
from hp_context import Documents
from hp_trainer.config import ModelConfig
from hp_trainer.model import Microbatch
from hp_transformers.stages.model import CausalModel, on_meta
from hp_transformers.stages.outline import Answers, outline_of

_CARRIES = re.compile(
    r"mamba|rwkv|recurrent|rglru|lightning|deltanet|xlstm|shortconv|linearattention"
    r"|compressor",
    re.IGNORECASE,
)
"""Names of classes that carry a state from token to token, or join keys of a sequence."""


def positions_of(
    model: CausalModel, config: ModelConfig, microbatch: Microbatch, x: Tensor, *, is_shared: bool
) -> dict[str, Tensor]:
    """Return the arguments of a model for positions of its tokens; none for whole sequences.

    Args:
        model: Model of transformers.
        config: Model configuration with the folder.
        microbatch: Microbatch, with the lengths of documents if these are packed.
        x: Input of the stage, [B, S, ...].
        is_shared: Whether other ranks have other positions of the same sequences.

    Raises:
        hp_base.errors.ConfigError: When the model would not keep documents apart.
    """
    if microbatch.documents is None and not is_shared:
        return {}
    name = type(model).__name__
    if is_shared and "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ConfigError(f"mesh.cp must be 1 with {name}, which takes no positions")
    positions = microbatch.positions if is_shared else None
    if microbatch.documents is None:
        assert positions is not None
        return {"position_ids": positions[None]}
    # Attention of hp-context reads positions by itself.
    if not is_shared and (why := _why_not(config.transformers, config.trust_remote_code)):
        raise ConfigError(f'data.documents must be "joined" with {name}: {why}')
    rows = []
    for documents in microbatch.documents:
        assert isinstance(documents, Documents)
        rows.append(torch.cat([torch.arange(length) for length in documents.lengths]))
    whole = torch.stack(rows).to(x.device)
    return {"position_ids": whole if positions is None else whole[:, positions]}


class _AtFirstLayerError(Exception):
    """Raised when the forward of a model comes to its first layer."""


@cache
def _why_not(folder: str, trust: bool) -> str:
    """Return the reason why a model does not keep documents apart; empty: it does, or may.

    Transformers recognises packed sequences by positions that begin with 0 in every document: the
    functions that make masks for attention look for that. A model that takes positions may still
    make masks without them, and a layer that carries a state from token to token has no mask.
    Neither raises an error, so both are looked for: by running the model on the meta device up to
    its first layer, and by the classes and convolutions of its layers. A model that passes both
    checks is run on real documents, see Note [Documents are tried].
    """
    from transformers import masking_utils  # noqa: PLC0415 - of those who have it

    config = ModelConfig(transformers=folder, trust_remote_code=trust)
    model, path = on_meta(config, torch.float32), outline_of(config).layers
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no positions and so knows no documents"
    layers = model.get_submodule(path)
    assert isinstance(layers, nn.ModuleList)
    for name, part in layers.named_modules():
        if isinstance(part, nn.Conv1d) or _CARRIES.search(type(part).__name__):
            return f"{path}.{name} ({type(part).__name__}) mixes tokens whatever positions say"
    found = []
    look = masking_utils.find_packed_sequence_indices

    def looked(position_ids: Tensor) -> Tensor | None:
        found.append(position_ids)
        packed: Tensor | None = look(position_ids)
        return packed

    def leave(*_args: object, **_kwargs: object) -> NoReturn:
        raise _AtFirstLayerError

    layers[0].forward = leave
    masking_utils.find_packed_sequence_indices = looked
    tokens = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    try:
        with Answers():
            model(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False)
    except _AtFirstLayerError:
        pass
    except Exception as error:  # noqa: BLE001 - models may raise anything
        return f"whether its masks depend on positions cannot be found out: {told(error, 120)}"
    finally:
        masking_utils.find_packed_sequence_indices = look
    return "" if found else "its masks do not depend on positions"
