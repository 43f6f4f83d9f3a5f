"""Training any row of Table 1: algorithms, the loop, runs on disk."""

from wideflat.training.runs import Run
from wideflat.training.training import Options, Training, train

__all__ = ["Options", "Run", "Training", "train"]
