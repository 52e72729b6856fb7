"""Run ranks in tests: processes or threads, a slow link, comparisons, operators, memory, exchanges.

It needs no test framework; if pytest is installed, the server of the ranks imports it once.
"""

from hp_platform.testing.comparing import Comparison, Difference, compare
from hp_platform.testing.exchanges import Exchange, record_exchanges
from hp_platform.testing.operators import LiveBytes, watch_operators
from hp_platform.testing.processes import RankError, run_distributed
from hp_platform.testing.slow import CountedClock, slow_group
from hp_platform.testing.threaded import run_in_threads

__all__ = [
    "Comparison",
    "CountedClock",
    "Difference",
    "Exchange",
    "LiveBytes",
    "RankError",
    "compare",
    "record_exchanges",
    "run_distributed",
    "run_in_threads",
    "slow_group",
    "watch_operators",
]
