"""Networks whose hidden units can be renumbered, and copies whose are."""

import torch
from torch import nn

from wideflat.landscape.hidden_units import hidden_units


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2, self.norm2 = nn.Conv2d(5, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """A stem, two residual blocks, pooling, flattened maps, two linear layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.pool, self.hidden, self.out = nn.MaxPool2d(2), nn.Linear(6 * 4, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.pool(self.blocks(self.stem(x)))
        return self.out(torch.relu(self.hidden(x.reshape(x.size(0), -1))))


class ResidualMLP(nn.Module):
    """A weight whose rows and columns are the same units."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.inner, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x.view(-1, 4))
        return self.out(x + torch.tanh(self.inner(self.norm(x))))


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), (4,), 2),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        (2, 4, 4),
        1,
    ),
    "residual": (Residual, (2, 4, 4), 4),  # the stem with all sums, one inside of each block, the hidden layer
    "layer norm": (ResidualMLP, (4,), 1),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    make, shape, count = NETWORKS[name]
    model = make().eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            module.weight.data.uniform_(0.5, 2.0)
            module.bias.data.normal_()
    return model, torch.randn(30, *shape), count


def shuffled(model, seed=0):
    """A copy that computes the same, its units in another order."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for units in hidden_units(model):
        p = torch.randperm(units.size, generator=generator)
        for axis in units.axes:
            tensor = state[axis.name]
            block = tensor.shape[axis.axis] // units.size
            index = (p[:, None] * block + torch.arange(block)).flatten()
            state[axis.name] = tensor.index_select(axis.axis, index)
    return state
