"""How experts are spread over ranks, as styles for torch's `parallelize_module`."""

from hp_expert.styles.base import BaseExpertParallel
from hp_expert.styles.expert_parallel import ExpertParallel

__all__ = ["BaseExpertParallel", "ExpertParallel"]
