"""Products with Hessian and Gauss-Newton matrix against the dense matrices."""

import pytest
import torch
from attention import Attention
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from wideflat.evaluation.blocks import Blocks
from wideflat.evaluation.evaluation import Evaluation
from wideflat.hessian.products import GaussNewton, Hessian


def outputs_of(model, x):
    """The outputs as a function of the weights as one vector, and these."""
    names, shapes = [n for n, _ in model.named_parameters()], [p.shape for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])

    def outputs(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        named = {n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, named, (x,))

    return outputs, flat


def dense(model, x, y):
    """Hessian and Gauss-Newton matrix of the mean cross-entropy, from their definitions."""
    outputs, flat = outputs_of(model, x)
    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(lambda v: nn.functional.cross_entropy(outputs(v), y), flat)
    jacobian = torch.autograd.functional.jacobian(outputs, flat)  # (n, C, D)
    p = outputs(flat).softmax(1)
    bent = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return hessian, torch.einsum("nci,ncd,ndj->ij", jacobian, bent, jacobian) / len(x)


def networks():
    torch.manual_seed(0)
    return {
        "mlp": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(13, 4)),
        "attention": (Attention(), torch.randn(6, 5, 4)),
    }


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_products_of_both_matrices_whole_and_by_layers(name):
    model, x = networks()[name]
    model, x = model.double().eval(), x.double()
    y = torch.randint(3, (len(x),))
    names = [n for n, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    for kind, expected in zip((Hessian, GaussNewton), dense(model, x, y), strict=True):
        evaluation = Evaluation(model, "loss", "eval", None)
        operator = kind(evaluation, Blocks((x, y), 4), names)
        with evaluation.prepared():
            operator.loss()
            whole = operator(torch.eye(len(expected), dtype=torch.float64))
            halves = [range(2), range(2, len(names))]
            cut = sum(sizes[:2])
            parts = operator.parts(halves, [torch.eye(d, dtype=torch.float64) for d in (cut, len(expected) - cut)])
        assert torch.allclose(whole, expected, atol=1e-10)
        assert torch.allclose(parts[0], expected[:cut, :cut], atol=1e-10)
        assert torch.allclose(parts[1], expected[cut:, cut:], atol=1e-10)
        assert bool(operator.attends) == (name == "attention") and len(operator.notes) == (name == "attention")
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_loss_that_is_linear_in_the_outputs_has_no_gauss_newton_matrix():
    model = nn.Linear(2, 1)
    evaluation = Evaluation(model, lambda outputs, targets: outputs[:, 0], "eval", None)
    operator = GaussNewton(evaluation, Blocks((torch.ones(3, 2), torch.ones(3)), 2), ["weight"])
    with evaluation.prepared():
        operator.loss()
        assert operator(torch.eye(2)).abs().max() == 0


def test_outputs_that_are_no_tensor_are_named():
    class Pair(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    evaluation = Evaluation(Pair(2, 1), lambda outputs, targets: outputs[0][:, 0] ** 2, "eval", None)
    operator = GaussNewton(evaluation, Blocks((torch.ones(3, 2), torch.ones(3)), 2), ["weight"])
    with evaluation.prepared(), pytest.raises(TypeError, match="outputs that are one tensor, got tuple"):
        operator.loss()
        operator(torch.eye(2))
