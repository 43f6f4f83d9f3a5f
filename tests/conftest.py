"""Settings of the whole test suite."""

import os
import signal

# A shell starts what runs in its background with Ctrl-C ignored; tests of interruptions, and their children, need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The suite runs one process a core; threads inside each would only fight. Read before torch starts its pool.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
