"""`python -m hp_overlap trace.json`."""

import sys

from hp_overlap.cli import main

sys.exit(main())
