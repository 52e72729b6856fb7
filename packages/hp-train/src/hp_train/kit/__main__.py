"""The command ``python -m hp_train.kit``."""

import sys

from hp_train.kit.command import main

if __name__ == "__main__":
    sys.exit(main())
