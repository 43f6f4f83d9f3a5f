"""Tests of this folder share energies with closed forms, and a naive twin."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
