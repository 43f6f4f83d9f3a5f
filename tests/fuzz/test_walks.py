"""Objects in a state that was drawn, and their methods in any order: settings, parameters and states spoilt in between.

    python tests/fuzz/test_walks.py [CASES] [SEED]

The other fuzzers call each door once, with a new object. Here an optimizer, a coupling or a result is walked through
some of its methods, with right arguments or strange ones; what is refused must be refused by us (`test_strange.py`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import wideflat

sys.path.insert(0, str(Path(__file__).parent))
from doors import pairs, steps, weights
from many import from_the_command_line
from more_doors import FOLDER, result
from strange import STRANGE, spoilt
from test_arguments import SECONDS, Hang, in_time
from test_strange import described, is_ours, place_of

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "EntropySGD": lambda: wideflat.EntropySGD(weights(), inner_steps=2, gamma=0.1, epsilon=1e-4, momentum=0.9),
    "Entropic": lambda: wideflat.Entropic(torch.optim.SGD(weights(), lr=0.1), inner_steps=2, epsilon=1e-4, pull=0.1),
    "Lookahead": lambda: wideflat.Lookahead(weights(), lr=0.5, inner_lr=0.1, inner_steps=2),
    "SNOO": lambda: wideflat.SNOO(torch.optim.SGD(weights(), lr=0.1), inner_steps=2),
    **{name: lambda name=name: getattr(wideflat, name)(weights(), lr=0.1)  # type: ignore[misc]
       for name in ("SAM", "ASAM", "GSAM", "FriendlySAM", "LookSAM")},
}  # fmt: skip
OTHERS: dict[str, Callable[[], Any]] = {
    "ReplicaCoupling": lambda: wideflat.ReplicaCoupling(pairs(), gamma=0.1, period=1),
    "EASGD": lambda: wideflat.EASGD(pairs(), period=1),
    "Focusing": lambda: wideflat.Focusing(wideflat.EntropySGD(weights()), total=5),
    "TargetDistance": lambda: wideflat.TargetDistance(wideflat.EntropySGD(weights(), epsilon=0.0), ratio=0.1),
    "Replicas": pairs,
    "ReplicaBatches": lambda: pairs().batches(DataLoader([0, 1, 2, 3], batch_size=2)),
    **{name: lambda name=name: result(name)  # type: ignore[misc]
       for name in ("energy", "spectrum", "shift", "slice", "entropy", "volume")},
}  # fmt: skip
OBJECTS = {**OPTIMIZERS, **OTHERS}
METHODS = [
    "step",
    "load_state_dict",
    "add_param_group",
    "center",
    "eval",
    "train",
    "recenter",
    "flush",
    "distance",
    "state_dict",
    "perturb",
    "restore",
    "couple",
    "barycenter",
    "at_barycenter",
    "initial_gamma",
    "distances",
    "prefetch",
    "loss",
    "own",
    "zero_grad",
    "compare",
    "interval",
    "sigma_at",
    "certified",
    "save",
    "joined",
    "mean",
    "density",
    "at",
    "to_pandas",
    "to_dict",
    "about",
]
#: Right arguments by their names; of the object where they are functions of it.
RIGHT: dict[str, Callable[[Any], Any]] = {
    "closure": lambda made: None,
    "state_dict": lambda made: copy.deepcopy(made.state_dict()),
    "param_group": lambda made: {"params": [nn.Parameter(torch.ones(2))]},
    "model": lambda made: made[0] if isinstance(made, wideflat.Replicas) else nn.ParameterList(weights()),
    "other": lambda made: made,
    "losses": lambda made: [1.0, 2.0],
    "batches": lambda made: [(torch.ones(3, 2), torch.ones(3, 1))] * 2,
    "criterion": lambda made: nn.functional.mse_loss,
    "path": lambda made: FOLDER / f"walk{'.npz' if isinstance(made, wideflat.LocalEntropy) else '.json'}",
    "function": lambda made: abs,
    "buffers": lambda made: "average",
    "amount": lambda made: 0.05,
    "shift": lambda made: 0.1,
    "relative_distance": lambda made: 0.05,
    "set_to_none": lambda made: True,
}
#: What only torch looks at: its own settings, and what it keeps itself.
OF_TORCH = ("dampening", "foreach", "fused", "maximize", "capturable", "differentiable", "momentum", "nesterov", "lr")


def spoil(made: torch.optim.Optimizer, chance: random.Random) -> str:
    """Change a setting, or a parameter, as a user may between two steps."""
    group = chance.choice(made.param_groups)
    if chance.random() < 0.6:
        name = chance.choice([name for name in group if name not in ("params", *OF_TORCH)])
        group[name] = chance.choice(STRANGE)()
        return f"group[{name}]"
    p = chance.choice([p for group in made.param_groups for p in group["params"]])
    how = chance.choice(["data", "double", "half", "no grad", "frozen", "nan"])
    with torch.no_grad():
        if how == "data":
            p.data = torch.ones(chance.choice([1, 7, 100]))
        elif how in ("double", "half"):
            p.data = getattr(p.data, how)()
        elif how == "frozen":
            p.requires_grad_(False)
        else:
            p.grad = None if how == "no grad" else torch.full_like(p, float("nan"))
    return f"parameter: {how}"


def call(made: Any, chance: random.Random, log: list[str]) -> None:
    """One of the methods, with right arguments or with some that are strange."""
    method = chance.choice([name for name in METHODS if callable(getattr(made, name, None))])
    function = getattr(made, method)
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [name for name in names if name in RIGHT or chance.random() < 0.3]
    arguments = {name: RIGHT[name](made) if name in RIGHT else chance.choice(STRANGE)() for name in names}
    wrong = [name for name in names if name not in ("path", "closure") and chance.random() < 0.3]
    changes = {name: (spoilt(arguments[name], chance)) for name in wrong}
    log.append(described(0, method, changes).partition(": ")[2])
    try:
        found = function(**{**arguments, **changes})
        with found if hasattr(found, "__enter__") else contextlib.nullcontext():
            pass
    except Exception as error:
        if not is_ours(error, changes):
            raise


def fault(number: int, seed: int) -> tuple[str, str | None]:
    """What was done, and what is wrong with how it was taken; None if nothing is."""
    chance = random.Random(f"{seed} walk {number}")
    torch.manual_seed(number)
    name = chance.choice(sorted(OBJECTS))
    log = [f"case {number}: {name}"]
    try:
        with in_time(SECONDS), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            made = OBJECTS[name]()
            if name in OPTIMIZERS and chance.random() < 0.5:
                steps(made, {}, 2)
            for _ in range(chance.choice([1, 2, 3, 5])):
                if name in OPTIMIZERS and chance.random() < 0.3:
                    log.append(spoil(made, chance))
                call(made, chance, log)
    except Hang:
        return ", ".join(log), f"no end after {SECONDS} seconds"
    except Exception as error:
        return ", ".join(log), None if is_ours(error, {}) else place_of(error)
    finally:
        matplotlib.pyplot.close("all")
    return ", ".join(log), None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_walks_are_refused_by_us(part):
    for number in range(25 * part, 25 * part + 25):
        done, what = fault(number, seed=0)
        assert what is None, done


if __name__ == "__main__":
    sys.exit(from_the_command_line("walks", fault))
