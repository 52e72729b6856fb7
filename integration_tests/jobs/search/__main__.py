"""See `command`."""

import sys

from hp_base.command_line import run_command
from integration_tests.jobs.search.command import run

if __name__ == "__main__":
    sys.exit(run_command(run))
