"""``python -m hp_verify`` is ``hp-verify``."""

import sys

from hp_verify.cli import main

if __name__ == "__main__":
    sys.exit(main())
