"""Recording of the experts that tokens choose, told by the layers while they run."""

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hp_base.runs import runs_in
from hp_expert import MoE, Routing
from hp_train.verify.agreeing import CHOICES, SCORES
from hp_train.verify.recording import Part, Recorder
from hp_trainer.model import DropoutKey, Microbatch
from hp_trainer.model.block import Block
from hp_trainer.training.train import Trainer


def listen_to_choices(trainer: Trainer, record: Callable[[], Recorder]) -> None:
    """Have every layer of experts tell which ones it chose, for each sequence of a step.

    Args:
        trainer: Its layers tell.
        record: Gives what takes it down.
    """
    current = threading.local()

    def enter(_block: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        microbatch: Microbatch = kwargs["microbatch"]
        current.places = microbatch.key

    def leave(name: str) -> Any:
        def hook(moe: MoE, _args: Any, result: tuple[Tensor, Routing]) -> None:
            places = getattr(current, "places", None)
            if places is not None:
                _add(record(), trainer, (name, moe, result[1]), places)

        return hook

    for stage in trainer.pipeline.modules.values():
        for name, module in stage.named_modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(enter, with_kwargs=True)
            if isinstance(module, MoE):
                module.register_forward_hook(leave(name))


def _add(
    record: Recorder, trainer: Trainer, layer: tuple[str, MoE, Routing], key: DropoutKey
) -> None:
    name, moe, routing = layer
    bias = moe.router.correction_bias
    scores = routing.scores.detach() if bias is None else routing.scores.detach() + bias
    batch, length = trainer.config.train.global_batch_size, trainer.config.data.seq_len
    index, positions = key.sequence_index, key.positions.tolist()
    of_rows = index if index.ndim == 2 else index[:, None].expand(-1, len(positions))
    for quantity, rows in ((CHOICES, routing.chosen), (SCORES, scores)):
        width = rows.shape[-1]
        for sequences, row in zip(of_rows, rows.view(*of_rows.shape, width), strict=True):
            for sequence, first, run in runs_in(sequences.tolist(), positions):
                offset = (sequence - trainer.next_sequence, first, 0)
                record.add(quantity, {name: Part(row[None, run], (batch, length, width), offset)})
        # What sequences of the data lack is in no microbatch of a plan.
        ends = {} if trainer.planned is None else trainer.planned.ends
        for sequence, end in ends.items():
            if end < length:
                nothing = rows.new_full((1, length - end, width), -1)
                offset = (sequence - trainer.next_sequence, end, 0)
                record.add(quantity, {name: Part(nothing, (batch, length, width), offset)})
