"""Batch norm folded into convolutions."""

import torch
from torch import nn

from wideflat.evaluation.folding import FoldedNetwork
from wideflat.models import resnet18


def randomised(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def test_a_folded_resnet_gives_the_same_outputs_and_shares_nothing_with_the_model():
    torch.manual_seed(0)
    model = randomised(resnet18(num_classes=10).double())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded = FoldedNetwork.fold(model)
    assert folded is not None and len(folded.pairs) == 20
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x))
        for parameter in folded.network.parameters():
            parameter.mul_(1.1)
        folded.refold()
        assert not torch.allclose(folded(x), model(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_refolding_follows_perturbed_weights_of_both_layers():
    model = randomised(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()))
    folded = FoldedNetwork.fold(model)
    x = torch.randn(4, 2, 5, 5)
    with torch.no_grad():
        for parameter, copy in zip(model.parameters(), folded.network.parameters(), strict=True):
            parameter.add_(torch.randn_like(parameter))
            copy.copy_(parameter)
        folded.refold()
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_folded_is_left_alone():
    class Twice(nn.Module):
        """The convolution has a second use besides the batch norm."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y

    class Branch(nn.Module):
        """Cannot be traced."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)

        def forward(self, x):
            return self.norm(self.conv(x)) if x.sum() > 0 else x

    hooked = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    hooked[0].register_forward_hook(lambda module, inputs, output: output)
    for model in (Twice(), Branch(), hooked, nn.Sequential(nn.Conv2d(1, 1, 1)), nn.Sequential(nn.BatchNorm2d(1))):
        assert FoldedNetwork.fold(model.eval()) is None
