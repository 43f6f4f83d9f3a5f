"""A checkpoint of somebody's own network in an empty folder, and the module that builds it."""

import pytest
import torch
from torch import nn

BUILDER = """
import torch
from torch import nn

def build():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=g)
    return nn.Sequential(nn.Linear(3, 2)), (x, (x[:, 0] > 0).long())

def wrong():
    return 3
"""


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """The name of the module; weights.pt beside it is the checkpoint."""
    monkeypatch.chdir(tmp_path)
    name = f"my_networks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BUILDER)
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(3, 2)).state_dict(), tmp_path / "weights.pt")
    return name
