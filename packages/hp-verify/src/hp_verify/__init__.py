"""Compare two training programs, as they are: the first number that differs, and why.

Also two checkpoints, whatever holds them, and two curves of losses beside their noise. Names load
what they need when somebody uses them: nothing here imports torch before.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_verify.comparing.findings import Comparison, Difference, Exact, Reproduction, Verdict
    from hp_verify.files.checkpoints import (
        CheckpointComparison,
        TensorDifference,
        compare_checkpoints,
        report_checkpoints,
        write_manifest,
    )
    from hp_verify.files.curves import read_curve
    from hp_verify.files.noise import CurveComparison, compare_curves
    from hp_verify.jobs import JobFailedError, report, verify
    from hp_verify.recording.values import Part, ValueRecorder

__all__ = [
    "CheckpointComparison",
    "Comparison",
    "CurveComparison",
    "Difference",
    "Exact",
    "JobFailedError",
    "Part",
    "Reproduction",
    "TensorDifference",
    "ValueRecorder",
    "Verdict",
    "__version__",
    "compare_checkpoints",
    "compare_curves",
    "read_curve",
    "report",
    "report_checkpoints",
    "verify",
    "write_manifest",
]
__version__ = "0.1.0"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "CheckpointComparison": "hp_verify.files.checkpoints",
        "Comparison": "hp_verify.comparing.findings",
        "CurveComparison": "hp_verify.files.noise",
        "Difference": "hp_verify.comparing.findings",
        "Exact": "hp_verify.comparing.findings",
        "JobFailedError": "hp_verify.jobs",
        "Part": "hp_verify.recording.values",
        "Reproduction": "hp_verify.comparing.findings",
        "TensorDifference": "hp_verify.files.checkpoints",
        "ValueRecorder": "hp_verify.recording.values",
        "Verdict": "hp_verify.comparing.findings",
        "compare_checkpoints": "hp_verify.files.checkpoints",
        "compare_curves": "hp_verify.files.noise",
        "read_curve": "hp_verify.files.curves",
        "report": "hp_verify.jobs",
        "report_checkpoints": "hp_verify.files.checkpoints",
        "verify": "hp_verify.jobs",
        "write_manifest": "hp_verify.files.checkpoints",
    },
)
