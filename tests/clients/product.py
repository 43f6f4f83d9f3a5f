"""The factors of the product that `test_product` walks through, and a part of it that meets every pair of them."""

import itertools
from dataclasses import dataclass, field
from functools import partial

import tiny_networks
import torch
from tiny_networks import NETWORKS, make
from torch import nn

import wideflat
from wideflat.integrations.huggingface import EntropicAround

#: Mini-batches in a cycle, and steps between two evaluations: w is looked at in the middle of cycles.
L, EVERY = 4, 3
CENTERED = {"lr": 0.5, "inner_lr": 0.05, "inner_steps": L}
ADAMW = partial(torch.optim.AdamW, lr=0.01)

#: What is made of params, and with which settings.
OPTIMIZERS = {
    "EntropySGD": (wideflat.EntropySGD, {**CENTERED, "momentum": 0.9}),
    "Entropic": (EntropicAround, {"inner": ADAMW, "inner_steps": L, "pull": 0.5}),
    "Lookahead": (wideflat.Lookahead, CENTERED),
    "Parle": (wideflat.EntropySGD, {**CENTERED, "epsilon": 0.0}),
    "SAM": (wideflat.SAM, {"base": torch.optim.AdamW, "lr": 0.01, "rho": 0.1}),
}
FACTORS = {
    "network": list(NETWORKS),
    "lora": [False, True],
    "trainer": ["Trainer", "Accelerate", "Lightning"],
    "optimizer": list(OPTIMIZERS),
    "setting": ["plain", "accumulated and clipped", "bf16", "compiled"],
}


@dataclass(frozen=True)
class Case:
    """One line of the product."""

    network: str
    lora: bool
    trainer: str
    optimizer: str
    setting: str

    def __str__(self):
        return f"{self.trainer}-{self.network}{'-lora' if self.lora else ''}-{self.optimizer}-{self.setting}"

    @property
    def accumulated(self):
        return 2 if self.setting == "accumulated and clipped" else 1

    @property
    def clip(self):
        return 0.5 if self.setting == "accumulated and clipped" else None

    @property
    def focused(self):
        return self.optimizer in ("EntropySGD", "Entropic")

    @property
    def names_are_lost(self):
        """transformers 5.23 saves a whole ViT under names that it does not load again, whatever the optimizer."""
        return (self.trainer, self.network, self.lora) == ("Trainer", "vit", False) and self.optimizer != "Parle"

    def make_network(self):
        model = Together(self.network, self.lora) if self.optimizer == "Parle" else make(self.network, self.lora)
        for module in model.modules():  # Lightning does not restore generators
            for name in ("p", "dropout", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model

    def make_optimizer(self, params):
        kind, settings = OPTIMIZERS[self.optimizer]
        return kind([p for p in params if p.requires_grad], **settings)

    def couple(self, model, optimizer):
        """What Parle does after each step; nothing for others."""
        if self.optimizer == "Parle":
            replicas = next(module for module in model.modules() if isinstance(module, wideflat.Replicas))
            wideflat.Parle(replicas, optimizer, gamma=0.5).couple()


class Together(nn.Module):
    """Two replicas as one network: the sum of their losses, each on its half of the mini-batch."""

    _keys_to_ignore_on_save = None  # the Trainer asks for it where a name of several was left out

    def __init__(self, name, lora):
        super().__init__()
        seeds = iter((1, 2))

        def one():
            model = make(name, lora)
            torch.manual_seed(next(seeds))
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad:
                        p.add_(0.02 * torch.randn_like(p))
            return model

        self.replicas = wideflat.Replicas(one, 2, share_frozen=lora)

    def forward(self, labels, input_ids=None, attention_mask=None, pixel_values=None):
        batch = {
            "labels": labels,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "pixel_values": pixel_values,
        }
        given = {name: value.chunk(2) for name, value in batch.items() if value is not None}
        halves = [{name: value[half] for name, value in given.items()} for half in (0, 1)]
        return {"loss": self.replicas.loss(halves)}


def name_once(module, state_dict, prefix, _):
    """Of what has several names one is saved: the Trainer refuses others from networks that are not of its classes."""
    seen = set()
    for name, value in list(state_dict.items()):
        if value.data_ptr() in seen:
            del state_dict[name]
        seen.add(value.data_ptr())


@dataclass
class Seen:
    """What a training has shown: by the number of the step, weights by name."""

    w: dict = field(default_factory=dict)
    w_prime: dict = field(default_factory=dict)
    evaluated: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    #: What the files hold that were saved at a step.
    saved: dict = field(default_factory=dict)
    #: The step that was chosen as the best, what the model holds after it was loaded, and a fresh one from its file.
    best: int = 0
    chosen: dict = field(default_factory=dict)
    loaded: dict = field(default_factory=dict)

    def note(self, step, model, optimizer):
        """Keep w as the optimizer has it after a step, before anybody acts on it."""
        self.w_prime[step] = weights(model)
        centers = {p: state["center"] for p, state in optimizer.state.items() if "center" in state}
        hidden = centers and not optimizer.at_center
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.w[step] = {name: (centers[p] if hidden else p).detach().clone() for name, p in plain(named).items()}

    def note_evaluation(self, step, model, loss):
        self.evaluated[step], self.losses[step] = weights(model), float(loss)


def plain(named):
    """The same by names without what compiling and wrapping puts into them."""
    return {name.replace("_orig_mod.", ""): value for name, value in named.items()}


def weights(model):
    return plain(tiny_networks.weights(model))


def whole_product():
    return [Case(*levels) for levels in itertools.product(*FACTORS.values())]


def covering_part():
    """Some twenty-five cases in which every two levels of two factors meet: greedily, the first of the best."""
    cases = whole_product()
    pairs = {case: set(_pairs(case)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _pairs(case):
    levels = [(name, getattr(case, name)) for name in FACTORS]
    return itertools.combinations(levels, 2)
