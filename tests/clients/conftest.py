"""Tests of this folder share `tiny_networks`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
