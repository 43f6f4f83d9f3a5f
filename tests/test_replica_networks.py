"""The sum of the replicas' losses, and what networks return for mappings."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import wideflat
from wideflat.replica_networks import Replicas


class Own(nn.Module):
    """A network that takes names and returns logits, and its loss if it is given labels."""

    def __init__(self, result=lambda **fields: SimpleNamespace(**fields)):
        super().__init__()
        self.net, self.result = nn.Linear(2, 3), result

    def forward(self, values, labels=None):
        logits = self.net(values)
        return self.result(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


@pytest.mark.parametrize("vectorize", [False, True])
def test_the_loss_is_the_sum_over_replicas(vectorize):
    torch.manual_seed(0)
    replicas = Replicas(lambda: nn.Linear(2, 3), 3, vectorize=vectorize)
    batches = [(torch.randn(4, 2), torch.randint(3, (4,))) for _ in range(3)]
    expected = sum(F.cross_entropy(m(x), y, label_smoothing=0.1) for m, (x, y) in zip(replicas, batches, strict=True))
    torch.testing.assert_close(replicas.loss(batches, label_smoothing=0.1), expected)
    with pytest.raises(ValueError, match="each of the 3 replicas, got 2"):
        replicas.loss(batches[:2])


@pytest.mark.parametrize("result", [lambda **fields: SimpleNamespace(**fields), dict])
def test_mappings(result):
    torch.manual_seed(0)
    replicas = Replicas(lambda: Own(result), 2)
    batches = [{"values": torch.randn(4, 2), "labels": torch.randint(3, (4,))} for _ in range(2)]
    expected = sum(F.cross_entropy(m.net(b["values"]), b["labels"]) for m, b in zip(replicas, batches, strict=True))
    torch.testing.assert_close(replicas.loss(batches), expected)
    shown = replicas.ensemble(batches[0])
    torch.testing.assert_close(shown, torch.stack([m.net(batches[0]["values"]).softmax(-1) for m in replicas]).mean(0))
    with pytest.raises(TypeError, match="must return its loss"):
        replicas.loss([{"values": b["values"]} for b in batches])


def test_a_network_without_logits_is_named():
    replicas = Replicas(lambda: Own(lambda **fields: (fields,)), 2)
    with pytest.raises(TypeError, match="got tuple"):
        replicas.ensemble({"values": torch.randn(4, 2)})


def test_a_training_without_hand_work_is_resumed_exactly():
    data = DataLoader(TensorDataset(torch.randn(12, 2), torch.randint(3, (12,))), batch_size=4)

    def parts():
        torch.manual_seed(0)
        replicas = Replicas(lambda: nn.Linear(2, 3), 2)
        opt = torch.optim.SGD(replicas.parameters(), lr=0.1, momentum=0.9)
        coupling = wideflat.ReplicaCoupling(replicas, period=2, gamma=0.1, optimizer=opt)
        focusing = wideflat.Focusing.from_epochs(coupling, epochs=2, steps=data, factor=10.0)
        return replicas, opt, coupling, focusing, replicas.batches(data)

    def train(all_parts, steps):
        replicas, opt, coupling, focusing, batches = all_parts
        while steps:
            for batch in batches:
                opt.zero_grad()
                replicas.loss(batch).backward()
                coupling.couple()
                opt.step()
                focusing.step()
                steps -= 1
                if not steps:
                    return

    whole, first, again = parts(), parts(), parts()
    train(whole, 6)
    train(first, 2)
    for saved, new in zip(first, again, strict=True):
        new.load_state_dict(saved.state_dict())
    train(again, 4)
    for p, q in zip(whole[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert whole[2].gamma == again[2].gamma == pytest.approx(1.0)
