"""Tests of this folder share `pgdl_folder`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
