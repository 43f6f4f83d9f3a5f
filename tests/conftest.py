"""Settings of the whole test suite."""

import os

# The suite runs one process a core; threads inside each would only fight. Read before torch starts its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
