"""Training any row of Table 1: one training, one loop, runs on disk."""

from wideflat.interruption import Interrupted
from wideflat.training.loop import configuration, train, train_in
from wideflat.training.options import Options
from wideflat.training.runs import Run
from wideflat.training.training import Diverged, Training

__all__ = ["Diverged", "Interrupted", "Options", "Run", "Training", "configuration", "train", "train_in"]
