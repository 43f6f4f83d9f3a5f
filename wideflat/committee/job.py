"""Groups of restarts, trained epoch by epoch: what runs on one thread of :func:`wideflat.committee.train`."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import torch
from torch import Tensor

from wideflat.committee.alignment import align
from wideflat.committee.checkpoint import Restart
from wideflat.committee.forms import Direct, DirectESGD, Form
from wideflat.committee.gram import GramESGD, GramRSGD, GramSGD
from wideflat.committee.machine import errors
from wideflat.committee.randomness import NOISE, ORDER, dropout_mask, generator, order
from wideflat.committee.settings import Setting
from wideflat.committee.skipping import skip
from wideflat.data.patterns import Patterns
from wideflat.kernels.committee import padded

__all__ = ["FORMS", "Group", "Job", "center", "make_form"]

#: How the weights can be kept, by the name of the form and of the algorithm.
FORMS: dict[str, dict[str, type[Form]]] = {
    "gram": {"sgd": GramSGD, "rsgd": GramRSGD, "esgd": GramESGD},
    "direct": {"sgd": Direct, "rsgd": Direct, "esgd": DirectESGD},
}

#: Networks (restarts times replicas) that are computed together: enough to hide the cost of a call, few enough for the
#: caches.
_GROUP = 128


def make_form(form: str, setting: Setting, patterns: Patterns, dtype: torch.dtype) -> Form:
    """The networks of a setting in one of the :data:`FORMS`, on the training patterns."""
    return FORMS[form][setting.algorithm](setting, patterns.inputs, patterns.targets, dtype)


def center(weights: Tensor) -> Tensor:
    """The solution that replicas (..., y, H, N) stand for: their barycenter, normalised."""
    mean = weights.mean(dim=-3)
    return mean / mean.norm(dim=-1, keepdim=True)


class Job:
    """The restarts of one setting, and how to train a group of them."""

    def __init__(
        self,
        setting: Setting,
        patterns: Patterns,
        restarts: list[Restart],
        dtype: torch.dtype,
        form: str,
        refresh: int,
        purpose: int = ORDER,
    ) -> None:
        self.setting, self.restarts, self.refresh, self.purpose = setting, restarts, refresh, purpose
        self.patterns, self.dtype, self.form = patterns, dtype, form
        self.lock = threading.Lock()
        self.cancel = threading.Event()
        self.at: dict[int, int] = {}  # epochs that the groups have come to since the last refresh, for progress

    def groups(self, workers: int) -> list[list[Restart]]:
        """Restarts to train together: at the same epoch, of a size that suits the caches, as many for each worker."""
        by_epoch: dict[int, list[Restart]] = {}
        for restart in self.restarts:
            if not restart.stop:
                by_epoch.setdefault(restart.epoch, []).append(restart)
        groups = []
        for same in by_epoch.values():
            rounds = math.ceil(len(same) * self.setting.num_replicas / (_GROUP * workers))
            count = min(len(same), rounds * workers)
            groups += [same[k::count] for k in range(count)]
        return groups

    @torch.inference_mode()
    def train(self, restarts: list[Restart]) -> None:
        """Train a group to its end, or until cancelled. Restarts are brought up to date at every refresh."""
        group = Group(self, restarts)
        while (group.restarts or group.ahead) and not self.cancel.is_set():
            if (group.loaded and group.epoch % self.refresh) or group.refresh():
                group.advance()

    def met(self, value: Tensor | float) -> bool:
        """Does a restart with this value end by its rule?"""
        return bool(value == 0 if self.setting.stop == "errors" else value < self.setting.tolerance)

    def now(self) -> list[Restart]:
        """All restarts as they were at their last refresh, for a checkpoint."""
        with self.lock:
            return [dataclasses.replace(restart) for restart in self.restarts]

    def done(self) -> float:
        """Restarts that have ended, and parts of the others as far as one can tell."""
        typical = self.setting.typical_epochs
        latest = max(self.at.values(), default=0)
        with self.lock:
            return sum(
                1.0 if restart.stop else min(max(restart.epoch, latest if restart.epoch else 0) / typical, 0.99)
                for restart in self.restarts
            )


class Group:
    """Restarts that are trained together, at the same epoch."""

    def __init__(self, job: Job, restarts: list[Restart]) -> None:
        self.job, self.restarts, self.epoch = job, restarts, restarts[0].epoch
        self.form = make_form(job.form, job.setting, job.patterns, job.dtype)
        self.loaded = False  # is the form where the restarts are?
        self.ahead: list[Restart] = []  # those that have skipped the epochs until the next refresh
        self.orders: dict[int, Tensor] = {}

    def refresh(self) -> bool:
        """Begin from weights that are computed from scratch; False if there is nobody who needs the coming epochs."""
        setting, due = self.job.setting, self.epoch % self.job.refresh == 0
        if self.loaded:
            self._publish()
        if self.ahead:
            self.orders = {}  # they were not drawn for those who come back
        self.restarts, self.ahead = self.restarts + self.ahead, []
        weights = torch.stack([restart.weights for restart in self.restarts])
        if setting.align and setting.num_replicas > 1 and due:
            weights = torch.stack([align(w) for w in weights])
        if due and (skipped := self._skip(weights)):
            self.ahead = [self.restarts[row] for row in skipped if not self.restarts[row].stop]
            kept = sorted(set(range(len(weights))).difference(skipped))
            self.restarts, weights, self.orders = [self.restarts[row] for row in kept], weights[kept], {}
        self.loaded = bool(self.restarts)
        if self.loaded:
            self.form.load(weights)
        else:
            self.epoch += self.job.refresh
            self.job.at[threading.get_ident()] = self.epoch
        return self.loaded

    def advance(self) -> None:
        """One epoch, after which the restarts that end leave the group."""
        setting, P = self.job.setting, len(self.job.patterns.inputs)
        self.form.seeds = [restart.seed for restart in self.restarts]
        masks = None
        if setting.dropout:
            drawn = [dropout_mask(setting, restart.seed, self.epoch, P) for restart in self.restarts]
            masks = torch.from_numpy(np.stack(drawn)).to(self.job.dtype)
        self.form.epoch(self.epoch, self._order(), masks)
        self.epoch += 1
        self.job.at[threading.get_ident()] = self.epoch
        value = self._rule()
        if ended := self._ended(value):
            self._leave(ended, value)

    def _order(self) -> Tensor:
        """The order of the data in this epoch; those of the next ones are drawn with it."""
        job, count = self.job, max(1, 16 // self.job.setting.passes_per_epoch)
        if self.epoch not in self.orders:
            for epoch in range(self.epoch, self.epoch + count):
                drawn = [
                    order(job.setting, one.seed, epoch, len(job.patterns.inputs), job.purpose) for one in self.restarts
                ]
                self.orders[epoch] = torch.from_numpy(np.stack(drawn))
        return self.orders.pop(self.epoch)

    def _leave(self, ended: list[int], value: Tensor) -> None:
        """Record how restarts ended, and go on without them."""
        job = self.job
        last = self.form.weights(ended)
        with job.lock:
            for row, weights in zip(ended, last, strict=True):
                restart = self.restarts[row]
                restart.weights, restart.epoch, restart.value = weights.clone(), self.epoch, float(value[row])
                restart.stop = job.setting.stop if job.met(value[row]) else "max_epochs"
        kept = sorted(set(range(len(self.restarts))).difference(ended))
        self.restarts = [self.restarts[row] for row in kept]
        self.orders = {epoch: rows[kept] for epoch, rows in self.orders.items()}
        self.form.select(kept)
        if not self.restarts:  # the next refresh is that of those ahead
            self.epoch, self.loaded = padded(self.epoch, job.refresh), False

    def _skip(self, weights: Tensor) -> list[int]:
        """Take the restarts that have no gradient until the next refresh there; their rows."""
        job, setting = self.job, self.job.setting
        if not self.form.can_skip:
            return []
        ahead = skip(
            setting,
            weights,
            job.patterns.inputs.to(job.dtype),
            job.patterns.targets,
            epoch=self.epoch,
            epochs=min(job.refresh, setting.max_epochs - self.epoch),
            threshold=self.form.threshold,
        )
        with job.lock:
            for one in ahead:
                restart = self.restarts[one.row]
                restart.weights, restart.epoch = one.weights, one.epoch
                if job.met(one.distance) or one.epoch >= setting.max_epochs:
                    restart.value = one.distance
                    restart.stop = setting.stop if job.met(one.distance) else "max_epochs"
        return [one.row for one in ahead]

    def _publish(self) -> None:
        """Compute the weights from scratch and put them where a checkpoint finds them."""
        weights, form = self.form.weights(), self.form
        if form.noise:
            for w, restart in zip(weights, self.restarts, strict=True):
                draw = generator(restart.seed, NOISE, self.epoch).standard_normal(w.shape)
                w += math.sqrt(form.noise) * torch.from_numpy(draw).to(w.dtype)
            weights /= weights.norm(dim=-1, keepdim=True)
        with self.job.lock:
            for w, restart in zip(weights, self.restarts, strict=True):
                restart.weights, restart.epoch = w.clone(), self.epoch

    def _rule(self) -> Tensor:
        """What the stopping rule measures, for each restart; exactly where it will be recorded."""
        last = self.epoch >= self.job.setting.max_epochs
        if self.job.setting.stop == "errors":
            return self.form.errors()
        if self.job.setting.stop == "loss":
            return self.form.loss(self.epoch - 1, exact=last)
        return self.form.distance(exact=last)

    def _ended(self, value: Tensor) -> list[int]:
        """The restarts that end now. Zero errors must hold for the weights themselves, computed from scratch."""
        job, last = self.job, self.epoch >= self.job.setting.max_epochs
        ended = [row for row in range(len(value)) if last or job.met(value[row])]
        if ended and job.setting.stop == "errors":
            exact = errors(center(self.form.weights(ended)), job.patterns.inputs, job.patterns.targets)
            value[ended] = exact.to(value.dtype)
            ended = [row for row in ended if last or job.met(value[row])]
        return ended
