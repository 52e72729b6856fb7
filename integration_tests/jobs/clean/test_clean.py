"""Clean jobs that are not accused, and bugs seeded in them that are named: some of each style."""

import pytest

from integration_tests.jobs.clean.catalogue import catalogue
from integration_tests.jobs.clean.job import DRAWN
from integration_tests.jobs.clean.runs import EQUAL, judge

pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning"),  # torch.distributed.optim
]

SHOWN = (
    "padding.dynamic-left",
    "order_and_sums.advantages",
    "chance.early_exit",
    "parallel.fsdp2_nested",
    "experts.routed-zeros",
    "vision_audio.detection",
    "engines.lightning",
    "drawn-003",
)


@pytest.mark.parametrize("name", SHOWN)
def test_a_clean_job_is_equal_and_bugs_in_it_are_named(name: str) -> None:
    found = judge(catalogue()[name])
    assert found.state == EQUAL, (found.first, found.likely, found.reason)
    assert [bug for bug in found.bugs if not bug.is_named] == []


def test_most_of_the_catalogue_is_written_by_hand() -> None:
    jobs = catalogue().values()
    assert sum(job.origin == DRAWN for job in jobs) <= len(jobs) / 2
    assert len({job.style for job in jobs}) >= 10
