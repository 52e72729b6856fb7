"""``python -m hp_train`` is ``hp``."""

import sys

from hp_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
