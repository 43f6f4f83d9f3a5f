"""Tests of this folder share `twins`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
