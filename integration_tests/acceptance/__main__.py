"""The command ``python -m integration_tests.acceptance``."""

import sys

from integration_tests.acceptance.command import main

if __name__ == "__main__":
    sys.exit(main())
