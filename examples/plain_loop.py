"""A plain training loop: SGD and Entropy-SGD, one line different, and how flat each minimum is.

python examples/plain_loop.py --steps 250
"""

import argparse

import torch
from torch.nn import functional as F

import wideflat
from wideflat.data import dress_coat

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=250)
steps = parser.parse_args().steps

patterns = dress_coat.load(500)  # images of dresses and coats that come with the package
x, y = patterns.inputs.view(-1, 1, 28, 28), (patterns.targets > 0).long()
test_x, test_y = patterns.test_inputs.view(-1, 1, 28, 28), (patterns.test_targets > 0).long()


def train(entropic: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = wideflat.models.smallconvnet(num_classes=2, image_size=28, in_channels=1)
    if entropic:
        opt = wideflat.EntropySGD(model.parameters(), lr=0.5, inner_lr=0.02)
    else:
        opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for _ in range(steps):
        batch = torch.randint(len(x), (50,))
        opt.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        opt.step()
    if entropic:
        opt.flush()  # the cycle is closed: the model holds the center
    return model.eval()


profiles = {}
for name in ("SGD", "Entropy-SGD"):
    model = train(entropic=name != "SGD")
    wrong = (model(test_x).argmax(1) != test_y).float().mean()
    profiles[name] = wideflat.local_energy(model, (x, y), [0.0, 0.2, 0.4, 0.6], progress=False)
    print(f"{name}: test error {100 * wrong:.1f} %\n{profiles[name]}\n")
