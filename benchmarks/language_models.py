"""Which optimizer for a small language model? Validation loss, flatness, rounding and forgetting, at equal gradients.

    python benchmarks/language_models.py --out results/language-model            trains what is missing, writes tables
    python benchmarks/language_models.py --out results/language-model --tables   the tables alone, from what is there

A byte-level GPT (861,312 weights) on the source text of Python's standard library; fine-tuned on its English help
texts. Both come with every Python, so nothing is downloaded. One JSON file a training, written when it ends: started
again, the command goes on with what is missing, and several processes share the work. DESIGN below is what was decided
before the first result was looked at.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import math
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from machine import describe
from pytorch_optimizer import ScheduleFreeAdamW
from scipy import stats
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wideflat
from wideflat.files import atomic_write
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
TUNING_SEED = 1000
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


def rate(step: int, steps: int, constant: bool) -> float:
    """Warm-up, then constant or cosine to a tenth."""
    warm = max(steps // 20, 1)
    if step < warm:
        return (step + 1) / warm
    return 1.0 if constant else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


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
            factor = rate(step, steps, way.constant)
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


class Campaign:
    """A folder with one JSON file a training; a file that another process has begun is left to it."""

    def __init__(self, folder: Path, steps: int, seeds: int) -> None:
        self.folder, self.steps, self.seeds = folder, steps, seeds
        self.runs = folder / "runs"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.texts: Texts | None = None

    def path(self, name: str, lr: float, seed: int) -> Path:
        """The file of one training."""
        words = name.replace(", ", "_").replace(" ", "-").replace("+", "and")
        return self.runs / f"{words}__{lr:.6g}__{seed}.json"

    def result(self, name: str, lr: float, seed: int) -> dict[str, Any] | None:
        """What a finished training gave."""
        path = self.path(name, lr, seed)
        return json.loads(path.read_text()) if path.exists() else None

    def do(self, name: str, lr: float, seed: int) -> bool:
        """Train and measure, unless it is there or under way elsewhere; whether it is there now."""
        path = self.path(name, lr, seed)
        if path.exists():
            return True
        with open(path.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            if path.exists():
                return True
            self.texts = self.texts or Texts.load()
            way, start = WAYS[name], time.process_time()
            model = train(way, lr, seed, round(self.steps * way.length), self.texts)
            row: dict[str, Any] = {"way": name, "lr": lr, "seed": seed, "steps": round(self.steps * way.length)}
            row["loss"] = validation(model, self.texts.validation)
            if seed != TUNING_SEED:
                row |= measure(model, self.texts)
            row |= {"seconds": time.process_time() - start, "on": describe(), "python": sys.version.split()[0]}
            with atomic_write(path) as file:
                json.dump(row, file, indent=1)
            print(f"{name}, lr {lr:g}, seed {seed}: {row['loss']:.4f}", flush=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
        return True

    def rate(self, name: str, train: bool) -> float | None:
        """The tuned rate; None while trainings that it hangs on are missing."""
        way = WAYS[name]
        if way.of is not None:
            lr = self.rate(way.of, train)
            return None if lr is None else lr * way.times
        center = way.lr
        while True:
            trio = [center / 2, center, center * 2]
            if train and not all(self.do(name, lr, TUNING_SEED) for lr in trio):
                return None
            found = [self.result(name, lr, TUNING_SEED) for lr in trio]
            if any(row is None for row in found):
                return None
            losses = [row["loss"] if math.isfinite(row["loss"]) else math.inf for row in found if row is not None]
            best = int(np.argmin(losses))
            if best == 1:
                return center
            center = trio[best]

    def run(self) -> None:
        """All that is missing; waits for what other processes have under way."""
        while True:
            missing = False
            for name in WAYS:
                lr = self.rate(name, train=True)
                done = lr is not None and all(self.do(name, lr, seed) for seed in range(self.seeds))
                missing = missing or not done
            if not missing:
                return
            time.sleep(5)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Finished trainings by way, seed by seed."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name in WAYS:
            lr = self.rate(name, train=False)
            results = [] if lr is None else [self.result(name, lr, seed) for seed in range(self.seeds)]
            if results and all(row is not None for row in results):
                found[name] = results  # type: ignore[assignment]
        return found


# ---- tables

MEASURES = ("energy, relative", "energy, absolute", "4 bits", "3 bits", "forgetting")


def interval(differences: np.ndarray) -> str:
    """Mean and half the width of its 95 % interval."""
    n = len(differences)
    if n < 2:
        return f"{differences.mean():+.3f}"
    half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / math.sqrt(n)
    return f"{differences.mean():+.3f} ± {half:.3f}"


def at_equal_loss(curve: list[list[dict[str, Any]]], rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """A measure minus the baseline's own at the same loss: a line through its three lengths, seed by seed."""
    differences = []
    for seed, row in enumerate(rows):
        x, y = ([length[seed][key] for length in curve] for key in ("loss", name))
        slope, offset = np.polyfit(x, y, 1)
        differences.append(row[name] - (offset + slope * row["loss"]))
    return np.array(differences)


def tables(campaign: Campaign) -> str:
    """Markdown: against AdamW at equal gradients, and at equal loss."""
    found = campaign.rows()
    lines = [f"{campaign.steps} gradients of {BATCH} x {CONTEXT} bytes, {campaign.seeds} seeds."]
    if "adamw" not in found:
        return "\n".join([*lines, "The baseline is not finished."])
    base = found["adamw"]
    value = lambda rows, key: np.array([row[key] for row in rows])  # noqa: E731 # a name for one expression
    lines += ["", "| way | lr | loss (nats a byte) | against AdamW | " + " | ".join(MEASURES) + " |"]
    lines += ["|" + "---|" * (4 + len(MEASURES))]
    for name, rows in found.items():
        cells = [name, f"{rows[0]['lr']:g}", f"{value(rows, 'loss').mean():.3f}"]
        cells.append("" if name == "adamw" else interval(value(rows, "loss") - value(base, "loss")))
        cells += [f"{value(rows, key).mean():.3f}" for key in MEASURES]
        lines.append("| " + " | ".join(cells) + " |")
    lengths = ["adamw, half", "adamw", "adamw, one and a half"]
    if all(name in found for name in lengths):
        curve = [found[name] for name in lengths]
        lines += ["", "At equal loss, minus the line through AdamW at three lengths:", ""]
        lines += ["| way | " + " | ".join(MEASURES) + " |", "|" + "---|" * (1 + len(MEASURES))]
        for name, rows in found.items():
            if name not in lengths:
                cells = [interval(at_equal_loss(curve, rows, key)) for key in MEASURES]
                lines.append("| " + " | ".join([name, *cells]) + " |")
    pairs = [("entropic, pull 1", "snoo"), ("entropic, pull 1", "control of pull 1")]
    pairs += [("entropic, pull 1, around muon + adamw", "muon + adamw"), ("entropic, pull 1", "schedule-free adamw")]
    lines += ["", "| difference of losses | |", "|---|---|"]
    lines += [
        f"| {a} minus {b} | {interval(value(found[a], 'loss') - value(found[b], 'loss'))} |"
        for a, b in pairs
        if a in found and b in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/language-model"), help="folder of the results")
    parser.add_argument("--steps", type=int, default=1000, help="gradients a training")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", action="store_true", help="do not train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    campaign = Campaign(options.out, options.steps, options.seeds)
    if not options.tables:
        campaign.run()
    text = tables(campaign)
    with atomic_write(options.out / "README.md") as file:
        file.write(f"# Ways to train a small language model\n\n```\n{DESIGN.strip()}\n```\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
