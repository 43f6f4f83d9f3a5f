"""How flat is the minimum in a file of weights? Local energy, free entropy and rounding, on one's own network.

python examples/measure_checkpoint.py
"""

import argparse
import tempfile
from pathlib import Path

import torch

import wideflat
from wideflat.data import dress_coat

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

patterns = dress_coat.load(200)
x, y = patterns.inputs, (patterns.targets > 0).long()


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "weights.pt"
    torch.manual_seed(0)
    trained = build()
    opt = torch.optim.SGD(trained.parameters(), lr=0.02, momentum=0.9)
    for _ in range(steps):  # somebody has trained it, long ago
        opt.zero_grad()
        torch.nn.functional.cross_entropy(trained(x), y).backward()
        opt.step()
    torch.save(trained.state_dict(), path)

    model = build()
    model.load_state_dict(torch.load(path, weights_only=True))

print(wideflat.local_energy(model, (x, y), torch.linspace(0, 0.5, 6), progress=False), "\n")
print(wideflat.free_entropy(model, (x, y), [0.3], subset=50, quick=True, progress=False), "\n")
print(wideflat.shift_profile(model, (x, y), quantize=[8, 4, 2]))
