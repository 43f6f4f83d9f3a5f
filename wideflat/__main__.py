"""``python -m wideflat``: the same as the command ``wideflat``."""

import sys

from wideflat.cli import main

sys.exit(main())
