"""Which optimizer for a small language model? Validation loss, flatness, rounding and forgetting, at equal gradients.

    python benchmarks/language_models.py --out results/language-model            trains what is missing, writes tables
    python benchmarks/language_models.py --out results/language-model --tables   the tables alone, from what is there
    python benchmarks/language_models.py --out FOLDER --steps 10000 --ways NAMES some of the ways, longer

A byte-level GPT (861,312 weights) on the source text of Python's standard library; fine-tuned on its English help
texts. Both come with every Python, so nothing is downloaded. One JSON file a training, written when it ends: started
again, the command goes on with what is missing, and several processes share the work. DESIGN below is what was decided
before the first result was looked at.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from campaign import TUNING_SEED, Campaign, Layout, rate, tables, write_page
from pytorch_optimizer import ScheduleFreeAdamW
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wideflat
from wideflat.seeds import derive_seed

DESIGN = """
1. Every way to train gets the same gradients: STEPS of 8 sequences of 64 bytes, the same sequences in the same order
   for the same seed, warm-up over 5 % of them, then cosine to a tenth of the rate (constant for EMA and Schedule-Free).
2. Rates are tuned alike: from a grid of factors 2, one training each with a seed that is used for nothing else; the
   best of three neighbours, the grid extended while the best lies at its end. Everything else (betas 0.9 and 0.99,
   decay 0.1 on matrices, clipping at 1, L = 20, outer 0.67 / 0.67) is fixed.
3. Three other seeds each; differences to AdamW are paired by seed, their 95 % intervals are Student's with 2 degrees
   of freedom.
4. A network that is trained further is sharper, so every measure of flatness is also compared at equal loss: with the
   line through AdamW at half, the same and one and a half times the gradients (same seed), at the loss of the network
   in question.
5. "The pull holds" if pull 1 has a smaller validation loss than both SNOO (the same without pull, its own tuned rate)
   and the control (the same without pull at the rate that makes cycles equally long), with intervals that exclude zero.
   Otherwise the default of the pull becomes 0.
"""

BATCH, CONTEXT, WIDTH, LAYERS, HEADS = 8, 64, 128, 4, 4
SIGMAS = {"relative": 0.1, "absolute": 0.02}
FINE_TUNING = {"steps": 200, "lr": 5e-4}


# ---- network and text


class Block(nn.Module):
    """Attention and a layer of four times the width, each after a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Of (B, T, WIDTH), the same."""
        batch, time_, _ = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, time_, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time_, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    """Logits of the next byte, from bytes (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Of bytes (B, T), logits (B, T, 256)."""
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Mean loss of sequences (B, T + 1), in nats a byte."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


@dataclass(frozen=True)
class Texts:
    """Bytes to train on, to validate on (other files), and to fine-tune on (another kind of text)."""

    train: Tensor
    validation: Tensor
    english: Tensor

    @classmethod
    @cache
    def load(cls) -> Texts:
        """From the running Python: a file in ten, chosen by its name, is for validation."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "pydoc_data"} & set(p.parts))
        held = [zlib.crc32(str(p.relative_to(root)).encode()) % 10 == 0 for p in files]
        topics = (root / "pydoc_data" / "topics.py").read_bytes()
        return cls(
            _bytes(b"".join(p.read_bytes() for p, h in zip(files, held, strict=True) if not h)),
            _bytes(b"".join(p.read_bytes() for p, h in zip(files, held, strict=True) if h)),
            _bytes(topics),
        )


def _bytes(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy()).long()


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """``count`` sequences of CONTEXT + 1 bytes at random places."""
    starts = np.random.default_rng(seed).integers(0, len(text) - CONTEXT - 1, count)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts])


# ---- ways to train


@dataclass(frozen=True)
class Way:
    """A way to train: what makes its optimizer from a network and a rate, and what follows.

    Args:
        make: The optimizer.
        lr: In the middle of the grid of rates.
        constant: No cosine.
        ema: Decay of the mean that is evaluated instead of the weights.
        of: Whose rate it has, times ``times``; None: its own, tuned.
        length: Of the training, in units of STEPS.
        focusing: The pull grows by this factor.
    """

    make: Callable[[nn.Module, float, int], Any]
    lr: float = 1e-3
    constant: bool = False
    ema: float | None = None
    of: str | None = None
    times: float = 1.0
    length: float = 1.0
    focusing: float | None = None


def groups(model: nn.Module, matrices: bool | None = None) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not; the hidden matrices alone, or all but them, where asked for."""
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]  # type: ignore[union-attr]
    names = {id(p) for p in hidden}
    decay = [p for p in model.parameters() if p.dim() == 2 and (matrices is None or (id(p) in names) == matrices)]
    rest = [p for p in model.parameters() if p.dim() != 2 and not matrices]
    return [{"params": decay, "weight_decay": 0.1}, *([{"params": rest, "weight_decay": 0.0}] if rest else [])]


def adamw(model: nn.Module, lr: float, steps: int) -> Optimizer:
    return AdamW(groups(model), lr=lr, betas=(0.9, 0.99), fused=True)


def muon(model: nn.Module, lr: float, steps: int) -> list[Optimizer]:
    hidden = Muon(groups(model, matrices=True)[0]["params"], lr=lr, adjust_lr_fn="match_rms_adamw", weight_decay=0.1)
    return [hidden, AdamW(groups(model, matrices=False), lr=lr, betas=(0.9, 0.99), fused=True)]


def schedule_free(model: nn.Module, lr: float, steps: int) -> Optimizer:
    return ScheduleFreeAdamW(groups(model), lr=lr, betas=(0.9, 0.99), warmup_steps=steps // 20, weight_decay=0.1)


def entropic(inside: Callable[..., Any], pull: float) -> Callable[[nn.Module, float, int], Optimizer]:
    def make(model: nn.Module, lr: float, steps: int) -> Optimizer:
        inner = inside(model, lr, steps)
        inner = inner if isinstance(inner, list) else [inner]
        return wideflat.Entropic(*inner, inner_steps=20, outer_lr=0.67, outer_momentum=0.67, pull=pull)

    return make


#: What is left of a cycle's way at pull 1: the mean over the cycle of the share that later pulls leave.
SHORTER = (1 - math.exp(-1)) / 1

WAYS: dict[str, Way] = {
    "adamw": Way(adamw),
    "adamw, half": Way(adamw, of="adamw", length=0.5),
    "adamw, one and a half": Way(adamw, of="adamw", length=1.5),
    "adamw constant + ema": Way(adamw, constant=True, ema=0.98),
    "schedule-free adamw": Way(schedule_free, constant=True, lr=8e-3),
    "snoo": Way(entropic(adamw, 0.0)),
    "entropic, pull 0.3": Way(entropic(adamw, 0.3)),
    "entropic, pull 1": Way(entropic(adamw, 1.0)),
    "entropic, pull 3": Way(entropic(adamw, 3.0)),
    "entropic, pull 0.3 to 3": Way(entropic(adamw, 0.3), focusing=10.0),
    "control of pull 1": Way(entropic(adamw, 0.0), of="entropic, pull 1", times=SHORTER),
    "muon + adamw": Way(muon),
    "entropic, pull 1, around muon + adamw": Way(entropic(muon, 1.0)),
}


# ---- one training


def train(way: Way, lr: float, seed: int, steps: int, texts: Texts) -> nn.Module:
    """A network trained one way, at the weights that the way gives as its solution."""
    torch.manual_seed(derive_seed(seed, "start"))
    model: nn.Module = ByteGPT()
    made = way.make(model, lr, steps)
    optimizers = made if isinstance(made, list) else [made]
    own = isinstance(made, ScheduleFreeAdamW)  # it warms up by itself
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    focusing = wideflat.Focusing(made, factor=way.focusing, total=steps) if way.focusing else None
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(way.ema)) if way.ema else None
    for step, batch in enumerate(batches(texts.train, steps, seed)):
        if not own:
            factor = rate(step, steps, way.constant, 0.1)
            for optimizer, rates in zip(optimizers, base, strict=True):
                for group, value in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = value * factor
        loss = loss_of(model, batch)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if focusing is not None:
            focusing.step()
        if mean is not None:
            mean.update_parameters(model)
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return copy.deepcopy(mean.module if mean is not None else model)


def batches(text: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """The same for every way with the same seed."""
    for step in range(steps):
        yield windows(text, BATCH, derive_seed(seed, "batch", step))


@torch.no_grad()
def validation(model: nn.Module, text: Tensor, count: int = 2048) -> float:
    """Loss on sequences that are the same for all."""
    return float(np.mean([float(loss_of(model, part)) for part in windows(text, count, 7).split(128)]))


def measure(model: nn.Module, texts: Texts) -> dict[str, float]:
    """What one asks of a minimum: noise, rounding, forgetting. Losses in nats a byte, differences to the unmoved."""
    held = windows(texts.validation, 256, 11)
    data = (held[:, :-1], held[:, 1:])
    quiet: dict[str, Any] = {"metric": "loss", "progress": False}
    found: dict[str, float] = {}
    for scale, sigma in SIGMAS.items():
        profile = wideflat.local_energy(model, data, [sigma], scale=scale, max_passes=4, **quiet)
        found[f"energy, {scale}"] = float(profile.mean[-1])
        found[f"energy, {scale}, stderr"] = float(profile.stderr[-1])
    rounded = wideflat.shift_profile(model, data, quantize=[4, 3], per="channel", noise=False, **quiet)
    for bits, value in zip((4, 3), rounded.mean.tolist(), strict=True):
        found[f"{bits} bits"] = value
    before = validation(model, texts.validation, 512)
    tuned = copy.deepcopy(model)
    optimizer = AdamW(tuned.parameters(), lr=FINE_TUNING["lr"], weight_decay=0.0, fused=True)
    for batch in batches(texts.english, int(FINE_TUNING["steps"]), 13):
        optimizer.zero_grad()
        loss_of(tuned, batch).backward()
        optimizer.step()
    found["forgetting"] = validation(tuned, texts.validation, 512) - before
    found["loss on the new text"] = validation(tuned, texts.english, 512)
    return found


# ---- all of them

LAYOUT = Layout(
    head="loss (nats a byte)",
    score="loss",
    measures=("energy, relative", "energy, absolute", "4 bits", "3 bits", "forgetting"),
    lengths=("adamw, half", "adamw", "adamw, one and a half"),
    equal="loss",
    words="AdamW",
)
PAIRS = [
    ("entropic, pull 1", "snoo"),
    ("entropic, pull 1", "control of pull 1"),
    ("entropic, pull 1, around muon + adamw", "muon + adamw"),
    ("entropic, pull 1", "schedule-free adamw"),
]


def one(name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """What a training gives; with the seed for tuning its loss alone."""
    way, texts = WAYS[name], Texts.load()
    steps = round(steps * way.length)
    model = train(way, lr, seed, steps, texts)
    row = {"steps": steps, "loss": validation(model, texts.validation)}
    return row if seed == TUNING_SEED else {**row, **measure(model, texts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/language-model"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=1000, help="gradients a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY", help="these alone")
    parser.add_argument("--tables", action="store_true", help="do not train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = {name: way for name, way in WAYS.items() if name in options.ways}
    if lost := [name for name, way in ways.items() if way.of is not None and way.of not in ways]:
        parser.error(f"{lost[0]!r} has the rate of {ways[lost[0]].of!r}: name that too")
    campaign = Campaign(options.out, ways, partial(one, steps=options.steps), "loss", options.seeds)
    if not options.tables:
        campaign.run()
    heading = f"{options.steps} gradients of {BATCH} x {CONTEXT} bytes, {options.seeds} seeds."
    text = f"{heading}\n\n{tables(campaign.rows(), LAYOUT, PAIRS)}"
    write_page(options.out, "Ways to train a small language model", DESIGN, text)
    print(text)


if __name__ == "__main__":
    main()
