"""Tests of this folder share `tiny_networks`, and a fixture."""

import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps its precision for the whole process; a test has its own."""
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
