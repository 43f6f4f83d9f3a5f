"""The committee machine of the paper: train it, and compute the local entropy of its solutions.

python examples/committee.py --restarts 3
"""

import argparse

import wideflat
from wideflat.committee import SETTINGS, train
from wideflat.data import dress_coat

parser = argparse.ArgumentParser()
parser.add_argument("--restarts", type=int, default=3)
parser.add_argument("--patterns", type=int, default=500)
options = parser.parse_args()

data = dress_coat.load(options.patterns, seed=1)
for name in ("sgd-fast", "rsgd-fast"):
    test = {"test_inputs": data.test_inputs, "test_targets": data.test_targets}
    solutions = train(SETTINGS[name], data.inputs, data.targets, seeds=range(options.restarts), **test, progress=False)
    print(solutions)
    solved = solutions.subset([r for r, good in enumerate(solutions.solved) if good])
    if len(solved):
        curve = wideflat.local_entropy(solved.weights, data.inputs, data.targets, deltas=[0.1, 0.3, 1.0])
        print(f"local entropy (0 is flattest) at d/D = 0.125: {curve.at(0.125).mean():.5f}\n")
