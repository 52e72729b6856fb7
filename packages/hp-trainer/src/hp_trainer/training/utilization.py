"""Model FLOPs utilization (MFU): of what the GPUs could compute, the share that the model needs.

Note [MFU]. MFU = F x tokens per second / (P x GPUs), where

- F are the model's operations per token: three times those of the forward as hp-plan counts them,
  which is asked by an entry point (a multiplication and its addition are two, backward is two
  forwards). Without hp-plan there is no MFU.
  They are those of the products: dense matrices, router, the experts that a token goes to, logits,
  modules of multi-token prediction, and of attention half of all scores (or the window's), whatever
  documents are packed. What is run again (`train.recompute`) is not counted.
- P is the dense peak of the data sheet in `train.dtype` of the GPU of rank 0: `PEAK_TERAFLOPS`.
- Seconds are those of the whole step, with reading data, reduction and optimizer, without
  evaluation and saving.
"""

from dataclasses import dataclass

import torch

from hp_base.data_sheets import peak_flops
from hp_platform import Runtime, all_gather_json, is_dry
from hp_trainer.config import Config
from hp_trainer.plugins import plugins


@dataclass(frozen=True, slots=True)
class Utilization:
    """What MFU is computed from.

    Attributes:
        flops: Operations of the model per token, forward and backward.
        peak: Peak operations per second of all GPUs together.
    """

    flops: float
    peak: float

    @classmethod
    def of(cls, config: Config, runtime: Runtime, *, vocab_size: int) -> "Utilization | None":
        """Say what MFU is computed from. All ranks call this together.

        Args:
            config: Configuration of the run.
            runtime: The initialised world.
            vocab_size: Rows of the embedding.

        Returns:
            None on a CPU, on GPUs that only pretend or whose peak is not known, and where nobody
            counts operations.
        """
        count = next(plugins("hp_trainer.model_flops"), None)
        if runtime.device.type != "cuda" or count is None or is_dry():
            return None
        properties = torch.cuda.get_device_properties(runtime.device)
        told = (properties.name, str(properties.uuid))
        everyone = all_gather_json(told, of=tuple[str, str], group=runtime.control)
        peak = peak_flops(everyone[0][0], config.train.dtype)
        if peak is None:
            return None
        num_gpus = len({uuid for _, uuid in everyone})  # several ranks may share one
        return cls(count(config, vocab_size=vocab_size), peak * num_gpus)

    def at(self, tokens_per_second: float) -> float:
        """MFU at a rate of all ranks together."""
        return self.flops * tokens_per_second / self.peak
