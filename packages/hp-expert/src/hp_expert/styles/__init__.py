"""How experts are spread over ranks, as styles for torch's `parallelize_module`."""

from hp_expert.styles.base import BaseExpertParallel, DispatchedParallel
from hp_expert.styles.expert_parallel import ExpertParallel
from hp_expert.styles.expert_tensor_parallel import ExpertTensorParallel
from hp_expert.styles.ranks import ExpertRanks
from hp_expert.styles.tensor_parallel import TensorParallel

__all__ = [
    "BaseExpertParallel",
    "DispatchedParallel",
    "ExpertParallel",
    "ExpertRanks",
    "ExpertTensorParallel",
    "TensorParallel",
]
