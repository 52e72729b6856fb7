"""Whether two layouts compute the same: both are run on the same batches and compared.

`pairs` says what is compared with what, `shrinking` makes a config small, `rank` is one rank of a
run, `runs` starts them and compares what they recorded. A job of one's own is a `Job`.
"""

from hp_train.verify.job import Build, Job

__all__ = ["Build", "Job"]
