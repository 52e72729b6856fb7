"""Any training job, recorded from outside and compared with another, without a change of it."""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_verify.comparing.compare import Comparison
    from hp_verify.jobs import JobFailedError, report, verify

__all__ = [
    "Comparison",
    "JobFailedError",
    "__version__",
    "report",
    "verify",
]
__version__ = "0.1.0"

__getattr__ = lazily(
    __name__,
    {
        "Comparison": "hp_verify.comparing.compare",
        "JobFailedError": "hp_verify.jobs",
        "report": "hp_verify.jobs",
        "verify": "hp_verify.jobs",
    },
)
