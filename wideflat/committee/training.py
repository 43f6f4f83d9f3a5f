"""Many committee machines trained at once: the engine of :func:`wideflat.committee.train`.

Restarts are trained in groups, a thread each (:mod:`wideflat.committee.forms` has the steps). Every ``refresh`` epochs
the weights are computed from scratch; a checkpoint has the restarts as they were then. Where no pattern of any replica
can have a coefficient until the next refresh, rSGD goes there at once: :mod:`wideflat.committee.skipping`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wideflat.committee.alignment import align
from wideflat.committee.forms import Direct, Form, Gram
from wideflat.committee.machine import Interrupted, Setting, Solutions, balanced_error, errors
from wideflat.committee.randomness import NOISE, ORDER, POLISH, dropout_mask, generator, initial_weights, order
from wideflat.committee.skipping import largest_coefficient, mixing, movement, spread
from wideflat.data.patterns import Patterns
from wideflat.files import atomic_write
from wideflat.kernels.committee import padded
from wideflat.progress import Progress

__all__ = ["run"]

#: Networks (restarts times replicas) that are computed together: enough to hide the cost of a call, few enough for the
#: caches.
_GROUP = 128

#: Seconds between two checkpoints.
_CHECKPOINT_INTERVAL = 30.0


@dataclass
class _Restart:
    """Where one restart stands: its weights at an epoch, and how it ended if it has."""

    seed: int
    weights: Tensor  # (y, H, N)
    epoch: int = 0
    stop: str = ""
    value: float = math.nan


class _Job:
    """The restarts of one setting, and how to train a group of them."""

    def __init__(
        self,
        setting: Setting,
        patterns: Patterns,
        restarts: list[_Restart],
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

    def groups(self, workers: int) -> list[list[_Restart]]:
        """Restarts to train together: at the same epoch, of a size that suits the caches, as many for each worker."""
        by_epoch: dict[int, list[_Restart]] = {}
        for restart in self.restarts:
            if not restart.stop:
                by_epoch.setdefault(restart.epoch, []).append(restart)
        groups = []
        for same in by_epoch.values():
            rounds = math.ceil(len(same) * self.setting.num_replicas / (_GROUP * workers))
            count = min(len(same), rounds * workers)
            groups += [same[k::count] for k in range(count)]
        return groups

    def make_form(self) -> Form:
        make = Gram if self.form == "gram" else Direct
        return make(self.setting, self.patterns.inputs, self.patterns.targets, self.dtype)

    @torch.inference_mode()
    def train(self, group: list[_Restart]) -> None:
        """Train a group to its end, or until cancelled. Restarts are brought up to date at every refresh."""
        setting, form = self.setting, self.make_form()
        P = self.patterns.inputs.shape[0]
        block = max(1, 16 // setting.passes_per_epoch)
        epoch = group[0].epoch
        orders: dict[int, Tensor] = {}
        ahead: list[_Restart] = []  # those that have skipped the epochs until the next refresh
        fresh = False
        while (group or ahead) and not self.cancel.is_set():
            if not fresh or epoch % self.refresh == 0:
                if fresh:
                    self._publish(group, form, epoch)
                group, ahead = group + ahead, []
                weights = torch.stack([restart.weights for restart in group])
                if setting.align and setting.num_replicas > 1 and epoch % self.refresh == 0:
                    weights = torch.stack([align(w) for w in weights])
                skipped = self._skip(group, weights, form, epoch) if epoch % self.refresh == 0 else []
                if skipped:
                    ahead = [group[row] for row in skipped if not group[row].stop]
                    kept = [row for row in range(len(group)) if row not in set(skipped)]
                    group, weights, orders = [group[row] for row in kept], weights[kept], {}
                    if not group:
                        epoch, fresh = epoch + self.refresh, False
                        self.at[threading.get_ident()] = epoch
                        continue
                form.load(weights)
                fresh = True
            form.seeds = [restart.seed for restart in group]
            if epoch not in orders:
                drawn = [
                    [order(setting, restart.seed, e, P, self.purpose) for restart in group]
                    for e in range(epoch, epoch + block)
                ]
                orders = {epoch + k: torch.from_numpy(np.stack(rows)) for k, rows in enumerate(drawn)}
            masks = None
            if setting.dropout:
                drawn_masks = [dropout_mask(setting, restart.seed, epoch, P) for restart in group]
                masks = torch.from_numpy(np.stack(drawn_masks)).to(self.dtype)
            form.epoch(epoch, orders[epoch], masks)
            epoch += 1
            self.at[threading.get_ident()] = epoch
            value = self._rule(form, epoch)
            ended = self._ended(form, value, epoch)
            if ended:
                last = form.weights(ended)
                with self.lock:
                    for row, weights in zip(ended, last, strict=True):
                        restart = group[row]
                        restart.weights, restart.epoch, restart.value = weights.clone(), epoch, float(value[row])
                        restart.stop = setting.stop if self._met(value[row]) else "max_epochs"
                kept = [row for row in range(len(group)) if row not in set(ended)]
                group = [group[row] for row in kept]
                orders = {e: rows[kept] for e, rows in orders.items()}
                form.select(kept)
                if not group:  # the next refresh is that of those ahead
                    epoch, fresh = padded(epoch, self.refresh), False

    def _skip(self, group: list[_Restart], weights: Tensor, form: Form, epoch: int) -> list[int]:
        """Take the restarts of rSGD that have no gradient until the next refresh there; their rows.

        Decided for each restart from its own weights, so that it does not depend on its neighbours.
        """
        setting = self.setting
        if setting.algorithm != "rsgd" or setting.stop != "distance" or setting.dropout or not isinstance(form, Gram):
            return []
        epochs = min(self.refresh, setting.max_epochs - epoch)
        ends = (epoch, epoch + epochs - 1)
        targets = self.patterns.targets.double()
        inputs = self.patterns.inputs.to(self.dtype)

        def felt(z: Tensor, reach: Tensor | float = 0.0) -> bool:
            return largest_coefficient(setting, z, reach, targets, ends).item() > form.threshold / 2

        still = {}  # row -> pre-activations of restarts that have no gradient where they are
        for row, w in enumerate(weights):
            if not felt(
                (w[0] @ inputs.T).double().view(1, 1, *w.shape[1:2], -1)
            ):  # most are known by the first replica
                z = (w.flatten(0, 1) @ inputs.T).double().view(1, *w.shape[:2], -1)
                if not felt(z):
                    still[row] = z
        if not still:
            return []
        starts = {row: weights[row].double() for row in still}
        overlaps = torch.stack([torch.einsum("ahi,bhi->hab", w, w) for w in starts.values()])
        mixtures = mixing(setting, overlaps, epoch, epochs, -(-len(inputs) // setting.batch_size))
        distances = torch.stack([spread(mixture, overlaps) for mixture in mixtures])
        skipped = []
        for k, (row, z) in enumerate(still.items()):
            if felt(z, movement(mixtures[:, k : k + 1], z)):
                continue
            skipped.append(row)
            near = (distances[:, k] < setting.tolerance).nonzero()
            last = int(near[0]) if len(near) else epochs - 1
            mixed = torch.einsum("hab,bhi->ahi", mixtures[last, k], starts[row])
            mixed /= mixed.norm(dim=-1, keepdim=True)
            restart = group[row]
            with self.lock:
                restart.weights, restart.epoch = mixed.to(self.dtype), epoch + last + 1
                if len(near) or restart.epoch >= setting.max_epochs:
                    restart.value = distances[last, k].item()
                    restart.stop = setting.stop if len(near) else "max_epochs"
        return skipped

    def _publish(self, group: list[_Restart], form: Form, epoch: int) -> None:
        """Compute the weights from scratch and put them where a checkpoint finds them."""
        weights = form.weights()
        if form.noise:
            for w, restart in zip(weights, group, strict=True):
                draw = generator(restart.seed, NOISE, epoch).standard_normal(w.shape)
                w += math.sqrt(form.noise) * torch.from_numpy(draw).to(w.dtype)
            weights /= weights.norm(dim=-1, keepdim=True)
        with self.lock:
            for w, restart in zip(weights, group, strict=True):
                restart.weights, restart.epoch = w.clone(), epoch

    def _rule(self, form: Form, epoch: int) -> Tensor:
        """What the stopping rule measures, for each restart."""
        if self.setting.stop == "errors":
            return form.errors()
        if self.setting.stop == "loss":
            return form.loss(epoch - 1, exact=epoch >= self.setting.max_epochs)
        return form.distance()

    def _met(self, value: Tensor) -> Tensor:
        return value == 0 if self.setting.stop == "errors" else value < self.setting.tolerance

    def _ended(self, form: Form, value: Tensor, epoch: int) -> list[int]:
        """The restarts that end now. Zero errors must hold for the weights themselves, computed from scratch."""
        last = epoch >= self.setting.max_epochs
        ended = list(range(len(value))) if last else self._met(value).nonzero().squeeze(1).tolist()
        if ended and self.setting.stop == "errors":
            exact = errors(_center(form.weights(ended)), self.patterns.inputs, self.patterns.targets)
            value[ended] = exact.to(value.dtype)
            ended = [row for row in ended if last or bool(self._met(value[row]))]
        return ended

    def done(self) -> float:
        """Restarts that have ended, and parts of the others as far as one can tell."""
        typical = self.setting.typical_epochs
        latest = max(self.at.values(), default=0)
        with self.lock:
            return sum(
                1.0 if restart.stop else min(max(restart.epoch, latest if restart.epoch else 0) / typical, 0.99)
                for restart in self.restarts
            )


def _center(weights: Tensor) -> Tensor:
    """The solution that replicas (..., y, H, N) stand for: their barycenter, normalised."""
    center = weights.mean(dim=-3)
    return center / center.norm(dim=-1, keepdim=True)


def run(
    setting: Setting,
    patterns: Patterns,
    seeds: list[int],
    *,
    name: str,
    dtype: torch.dtype,
    form: str,
    refresh: int,
    threads: int | None,
    checkpoint: str | os.PathLike[str] | None,
    progress: bool,
) -> Solutions:
    """Train, polish and measure; the arguments are those of :func:`wideflat.committee.train`."""
    form = _choose_form(form, setting, patterns, refresh)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    if refresh < 1:
        raise ValueError(f"refresh must be >= 1, got {refresh}")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds must be different whole numbers >= 0, at least one; got {list(seeds)[:10]}")
    workers = torch.get_num_threads() if threads is None else threads
    if workers < 1:
        raise ValueError(f"threads must be >= 1, got {threads}")
    num_inputs = patterns.inputs.shape[1]
    restarts = [_Restart(seed, initial_weights(setting, seed, num_inputs).to(dtype)) for seed in seeds]
    options = {"dtype": str(dtype).removeprefix("torch."), "form": form, "refresh": refresh, "source": patterns.source}
    identity = {"setting": setting.identity(), "seeds": seeds, "data": _digest(patterns), **options}
    if checkpoint is not None and os.path.exists(checkpoint):
        _resume(checkpoint, identity, restarts, dtype)
    job = _Job(setting, patterns, restarts, dtype, form, refresh)

    def save() -> None:
        if checkpoint is not None:
            _save(checkpoint, identity, job)

    try:
        bar = Progress(f"committee {name}", len(seeds), progress, before=job.done())
        _execute(job, workers, save, bar)
    except KeyboardInterrupt:
        save()
        finished = sum(bool(restart.stop) for restart in restarts)
        hint = f"; run it again to go on from {os.fspath(checkpoint)}" if checkpoint is not None else ""
        message = f"interrupted with {finished} of {len(seeds)} restarts finished{hint}"
        raise Interrupted(message, _measure(setting, patterns, restarts, name, options, job)) from None
    except Exception:
        save()  # whatever went wrong, the last refresh is good
        raise
    save()
    return _measure(setting, patterns, restarts, name, options, job)


def _choose_form(form: str, setting: Setting, patterns: Patterns, refresh: int) -> str:
    if form not in ("auto", "gram", "direct"):
        raise ValueError(f'form must be "auto", "gram" or "direct", got {form!r}')
    if form != "auto":
        return form
    num_patterns, num_inputs = patterns.inputs.shape
    # the noise that a pre-activation gathers in an inner step, against its own size of about |x| |w|
    felt = setting.algorithm == "esgd" and setting.epsilon * math.sqrt(setting.inner_lr * num_inputs) > 1e-4
    return "direct" if felt or num_patterns > 1.5 * num_inputs else "gram"


def _execute(job: _Job, workers: int, save: Callable[[], None], progress: Progress) -> None:
    """Train all groups on worker threads, with progress and checkpoints from this one."""
    groups = job.groups(workers)
    if not groups:
        return
    threads_before = torch.get_num_threads()

    def single_threaded() -> None:
        torch.set_num_threads(1)  # of this worker; the other core has the other group

    saved = time.monotonic()
    try:
        with progress, ThreadPoolExecutor(min(workers, len(groups)), initializer=single_threaded) as pool:
            futures = [pool.submit(job.train, group) for group in groups]
            try:
                while True:
                    ended, going = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
                    if not going or any(future.exception() for future in ended):
                        break
                    progress.update(job.done(), epoch=max(job.at.values(), default=0))
                    if time.monotonic() - saved > _CHECKPOINT_INTERVAL:
                        save()
                        saved = time.monotonic()
                for future in ended:
                    future.result()  # raises what a worker raised
                progress.update(job.done())
            except BaseException:
                job.cancel.set()
                raise
    finally:
        torch.set_num_threads(threads_before)


def _measure(
    setting: Setting, patterns: Patterns, restarts: list[_Restart], name: str, options: dict, job: _Job
) -> Solutions:
    """Polish where that is asked for, count errors, and put everything together."""
    weights = _center(torch.stack([restart.weights for restart in restarts]))
    before = errors(weights, patterns.inputs, patterns.targets).tolist()
    polish_epochs, movement = [0] * len(restarts), [0.0] * len(restarts)
    wrong = [i for i, count in enumerate(before) if count and restarts[i].stop]
    if setting.polish_epochs and wrong:
        weights, steps = _polish(setting, patterns, weights, restarts, wrong, job)
        for i, moved, epochs in steps:
            movement[i], polish_epochs[i] = moved, epochs
    count = max(len(patterns.test_inputs), 1)
    test = errors(weights, patterns.test_inputs, patterns.test_targets).double() / count
    if len(patterns.test_inputs) == 0:
        test = torch.full_like(test, math.nan)
    return Solutions(
        weights=weights,
        inputs=patterns.inputs,
        targets=patterns.targets,
        test_inputs=patterns.test_inputs,
        test_targets=patterns.test_targets,
        name=name,
        setting=setting,
        seeds=[restart.seed for restart in restarts],
        epochs=[restart.epoch for restart in restarts],
        stop=[restart.stop or "interrupted" for restart in restarts],
        value=[restart.value for restart in restarts],
        errors_before=before,
        train_errors=errors(weights, patterns.inputs, patterns.targets).tolist(),
        polish_epochs=polish_epochs,
        polish_movement=movement,
        test_error=test.tolist(),
        balanced_test_error=balanced_error(weights, patterns.test_inputs, patterns.test_targets).tolist(),
        options=options,
    )


def _polish(
    setting: Setting, patterns: Patterns, weights: Tensor, restarts: list[_Restart], wrong: list[int], job: _Job
) -> tuple[Tensor, list[tuple[int, float, int]]]:
    """Plain SGD with growing beta on solutions that have errors, until they have none."""
    plain = Setting(
        "sgd",
        lr=setting.polish_lr,
        tanh_beta0=setting.polish_beta0,
        tanh_beta1=setting.polish_beta1,
        omega0=setting.polish_omega,
        omega1=0.0,
        stop="errors",
        max_epochs=setting.polish_epochs,
        hidden=setting.hidden,
        batch_size=setting.batch_size,
        gradient_scale=setting.gradient_scale,
        tanh_beta_max=setting.tanh_beta_max,
    )
    chosen = [_Restart(restarts[i].seed, weights[i : i + 1].clone()) for i in wrong]
    polishing = _Job(plain, patterns, chosen, job.dtype, job.form, job.refresh, purpose=POLISH)
    for group in polishing.groups(1):
        polishing.train(group)
    weights = weights.clone()
    steps = []
    for i, restart in zip(wrong, chosen, strict=True):
        moved = float((restart.weights[0] - weights[i]).square().sum()) / setting.hidden
        steps.append((i, moved, restart.epoch))
        weights[i] = restart.weights[0]
    return weights, steps


# --------------------------------------------------------------------------------------------------------- checkpoints


def _digest(patterns: Patterns) -> str:
    digest = hashlib.sha256(patterns.inputs.contiguous().numpy().tobytes())
    digest.update(patterns.targets.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _save(path: str | os.PathLike[str], identity: dict, job: _Job) -> None:
    with job.lock:
        record = [{"epoch": r.epoch, "stop": r.stop, "value": r.value} for r in job.restarts]
        weights = torch.stack([r.weights for r in job.restarts]).numpy()
    with atomic_write(path, "wb") as file:
        metadata = {"format": "wideflat committee checkpoint 1", "identity": identity, "restarts": record}
        np.savez(file, metadata=np.array(json.dumps(metadata)), weights=weights)


def _resume(path: str | os.PathLike[str], identity: dict, restarts: list[_Restart], dtype: torch.dtype) -> None:
    """Bring restarts to where a checkpoint has them."""
    where = Path(path)
    try:
        with open(where, "rb") as file, np.load(file, allow_pickle=False) as content:
            metadata = json.loads(str(content["metadata"]))
            weights = torch.from_numpy(content["weights"])
        saved, record = metadata["identity"], metadata["restarts"]
    except (zipfile.BadZipFile, EOFError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{where} is not a whole checkpoint of committee training ({error}); delete it to start again"
        ) from error
    identity = json.loads(json.dumps(identity))
    if saved != identity:
        differs = [key for key in identity if saved.get(key) != identity[key]]
        raise ValueError(
            f"{where} is the checkpoint of another run: it differs in {', '.join(differs)}; "
            "give the same arguments, or another file"
        )
    for restart, w, line in zip(restarts, weights, record, strict=True):
        restart.weights, restart.epoch = w.to(dtype), line["epoch"]
        restart.stop, restart.value = line["stop"], line["value"]
