"""What the demo prints can be pasted, and is what it ran."""

import torch

from wideflat.commands import demo as command
from wideflat.experiments.demo import ONE_LINE


def test_the_advice_works_when_pasted():
    code = [line.strip() for line in command.NEXT.splitlines() if line.startswith("  ")]
    assert max(map(len, command.NEXT.splitlines())) <= 80
    assert len(code) == 3 and ONE_LINE["Entropy-SGD"] in code
    torch.manual_seed(0)
    inputs = torch.randn(64, 5)
    targets = (inputs[:, 0] > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    names = {"model": model, "inputs": inputs, "targets": targets}
    exec(code[0], names)
    exec(code[1], names)
    for _ in range(100):
        names["opt"].zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        names["opt"].step()
    exec(code[2], names)
    assert names["profile"].baseline <= 0.05 and len(names["profile"].mean) == 4
