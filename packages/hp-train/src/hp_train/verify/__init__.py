"""Comparison of two layouts: both are run on the same batches, and must compute the same.

`pairs` says what is compared with what, `shrinking` makes a config small, `rank` is one rank of a
run, `runs` starts them and compares what they recorded. A job of one's own is a `Job`.
"""

from typing import TYPE_CHECKING

from hp_base.lazy import lazily

if TYPE_CHECKING:
    from hp_train.verify.rank import Build, Job

__all__ = ["Build", "Job"]

__getattr__, __dir__ = lazily(
    __name__, {"Build": "hp_train.verify.rank", "Job": "hp_train.verify.rank"}
)
