"""What a step launches on an accelerator, counted on the meta device, against torch's own optimizers.

python benchmarks/launches.py      a second
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import wideflat

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
CYCLE = {"inner_steps": 2, "lr": 0.5, "inner_lr": 0.02}

#: What launches nothing.
VIEWS = {"detach", "view", "as_strided", "split_with_sizes", "slice", "alias", "empty_like", "empty_strided", "empty"}
VIEWS |= {"split", "unbind", "select", "t", "unsqueeze", "expand", "permute", "transpose", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it, and count it."""
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        on_device = any(t.device.type == "meta" for t in tensors)  # what is done to counters on the CPU is no launch
        self.count += on_device and func.overloadpacket.__name__ not in VIEWS
        return result


def parameters(count: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.empty(4 + k % 3, 5, device="meta")) for k in range(count)]
    for p in params:
        p.grad = torch.empty_like(p)
    return params


def steps_of(opt: torch.optim.Optimizer) -> Callable[[], object]:
    """A step; with both gradients of SAM, which cost nothing here."""
    if not isinstance(opt, wideflat.SAM):
        return opt.step
    gradients = [(p, torch.empty_like(p)) for group in opt.param_groups for p in group["params"]]

    def step() -> None:
        opt.perturb()
        for p, gradient in gradients:
            p.grad = gradient
        opt.restore()
        opt.step()

    return step


def counted(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tensors: int) -> tuple[int, int]:
    """Launches of a first and of a last step of a cycle of two."""
    step = steps_of(make(parameters(tensors)))
    for _ in range(4):
        step()
    found = []
    for _ in range(2):
        with Launches() as launches:
            step()
        found.append(launches.count)
    return found[0], found[1]


def main() -> None:
    adamw = lambda params: torch.optim.AdamW(params, foreach=True)  # noqa: E731
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD (torch, foreach)": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True, **SGD),
        "AdamW (torch, foreach)": adamw,
        "EntropySGD, no noise": lambda params: wideflat.EntropySGD(params, epsilon=0.0, **CYCLE, **SGD),
        "EntropySGD": lambda params: wideflat.EntropySGD(params, **CYCLE, **SGD),
        "EntropySGD, capturable, no noise": lambda params: wideflat.EntropySGD(
            params, epsilon=0.0, capturable=True, **CYCLE, **SGD
        ),
        "EntropySGD, capturable": lambda params: wideflat.EntropySGD(params, capturable=True, **CYCLE, **SGD),
        "Lookahead": lambda params: wideflat.Lookahead(params, **CYCLE, **SGD),
        "Entropic(AdamW)": lambda params: wideflat.Entropic(adamw(params), inner_steps=2),
        "Entropic(AdamW), pull and mean": lambda params: wideflat.Entropic(
            adamw(params), inner_steps=2, pull=1.0, alpha=0.5
        ),
    }
    for kind in (wideflat.SAM, wideflat.ASAM, wideflat.GSAM, wideflat.FriendlySAM):
        makers[f"{kind.__name__}(SGD)"] = lambda params, kind=kind: kind(params, lr=0.1, foreach=True, **SGD)
    print("Launches of the first and of the last step of a cycle of two, 20 and 200 tensors\n")
    print("| | 20 tensors | 200 tensors |\n|---|---|---|")
    for name, make in makers.items():
        few, many = (" and ".join(map(str, dict.fromkeys(counted(make, tensors)))) for tensors in (20, 200))
        print(f"| {name} | {few} | {many} |")


if __name__ == "__main__":
    main()
