"""Many committee machines trained at once (Algorithms 1 and 2, Appendix B.1).

Restarts are trained in groups, a thread each (:mod:`wideflat.committee.job`); :mod:`wideflat.committee.forms` and
:mod:`wideflat.committee.gram` have the steps. Every ``refresh`` epochs the weights are computed from scratch; a
checkpoint has the restarts as they were then. Where no pattern of any replica can have a coefficient until the next
refresh, rSGD goes there at once: :mod:`wideflat.committee.skipping`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from wideflat import interruption
from wideflat.checks import choice, elements, shown, whole
from wideflat.checks.records import location
from wideflat.committee import checkpoint as checkpoints
from wideflat.committee.checkpoint import Restart
from wideflat.committee.job import FORMS, Job, center
from wideflat.committee.machine import balanced_error, errors
from wideflat.committee.randomness import POLISH, initial_weights
from wideflat.committee.settings import SETTINGS, Setting
from wideflat.committee.solutions import Solutions
from wideflat.data.patterns import Patterns
from wideflat.progress import Progress

__all__ = ["Interrupted", "train"]

#: Seconds between two checkpoints.
_CHECKPOINT_INTERVAL = 30.0


class Interrupted(interruption.Interrupted):
    """Training was interrupted with Ctrl-C; ``solutions`` holds what there is, unfinished restarts included."""

    def __init__(self, message: str, solutions: Solutions) -> None:
        super().__init__(message)
        self.solutions = solutions


def train(
    setting: Setting | str,
    inputs: Tensor,
    targets: Tensor,
    seeds: Sequence[int] = range(50),
    *,
    test_inputs: Tensor | None = None,
    test_targets: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    form: str = "auto",
    refresh: int = 50,
    threads: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
    source: str = "arrays",
) -> Solutions:
    """Train committee machines from many random restarts together (Algorithms 1 and 2, Appendix B.1).

    Every restart has its own seed, which sets its initial weights and the order of its data; what it does depends on
    that seed alone, bit for bit, not on the restarts beside it nor on the number of threads.

    Args:
        setting: A :class:`Setting`, or the name of one of :data:`SETTINGS`.
        inputs: Training patterns, (P, N), +-1 or real.
        targets: Their labels, +1 or -1.
        seeds: One restart for each.
        test_inputs: Patterns to measure the test error on.
        test_targets: Their labels.
        dtype: float32 or float64.
        form: How a step is computed. ``"gram"`` works on the pre-activations of all training patterns through their
            Gram matrix (about P H B multiplications a step with a batch of B), ``"direct"`` on the weights (2 N H B).
            They agree up to rounding, except for the noise of eSGD: ``"direct"`` adds it at every inner step, while
            ``"gram"`` adds it to w at every refresh, with the variance gathered until then. ``"auto"`` takes
            ``"gram"`` where it is cheaper (P <= 1.5 N) and the noise too small to be felt in between.
        refresh: Epochs between two computations of the weights from scratch, which end the accumulation of rounding
            errors. State is saved there, and hidden units are aligned there if the setting says so.
        threads: Threads to compute on, by default ``torch.get_num_threads()``.
        checkpoint: A file to save the state to about twice a minute. If it is there, training goes on from it, and
            ends with the result of an uninterrupted run, bit for bit. It is deleted by the caller, not here.
        progress: Whether to show progress.
        source: Where the patterns come from, for the record.

    Raises:
        Interrupted: On Ctrl-C. Its ``solutions`` has what is done; with ``checkpoint`` nothing is lost.

    Example:
        Four patterns that one direction separates:

        >>> x = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
        >>> y = torch.tensor([1.0, 1.0, -1.0, -1.0])
        >>> setting = SETTINGS["sgd-fast"].replace(hidden=3, batch_size=2, lr=1e-3)
        >>> solutions = train(setting, x, y, seeds=range(3), progress=False)
        >>> solutions.train_errors, solutions.stop
        ([0, 0, 0], ['errors', 'errors', 'errors'])
    """
    name, setting = _named(setting)
    seeds = [whole("a seed", seed) for seed in elements("seeds", seeds, "a sequence of whole numbers")]
    patterns = Patterns.from_arrays(inputs, targets, test_inputs, test_targets, source)
    workers = torch.get_num_threads() if threads is None else whole("threads", threads, 1)
    form = _choose_form(form, setting, patterns)
    refresh = whole("refresh", refresh, 1)
    _check(dtype, seeds)
    restarts = [Restart(seed, initial_weights(setting, seed, patterns.inputs.shape[1]).to(dtype)) for seed in seeds]
    options = {"dtype": str(dtype).removeprefix("torch."), "form": form, "refresh": refresh, "source": patterns.source}
    identity = {"setting": setting.identity(), "seeds": seeds, "data": checkpoints.digest(patterns), **options}
    if checkpoint is not None and os.path.exists(location("checkpoint", checkpoint)):
        restarts = checkpoints.read(checkpoint, identity, restarts)
    job = Job(setting, patterns, restarts, dtype, form, refresh)

    def save() -> None:
        if checkpoint is not None:
            checkpoints.write(checkpoint, identity, job.now())

    try:
        _execute(job, workers, save, Progress(f"committee {name}", len(seeds), progress, before=job.done()))
    except KeyboardInterrupt:
        hint = f"; run it again to go on from {os.fspath(checkpoint)}" if checkpoint is not None else ""
        finished = sum(bool(restart.stop) for restart in job.restarts)
        message = f"interrupted with {finished} of {len(seeds)} restarts finished{hint}"
        raise Interrupted(message, _measure(job, name, options)) from None
    return _measure(job, name, options)


def _named(setting: Setting | str) -> tuple[str, Setting]:
    """A setting and its name, which is that of the algorithm where it has none."""
    if not isinstance(setting, (str, Setting)):
        raise TypeError(f"setting must be a Setting or the name of one, got {shown(setting)}")
    if isinstance(setting, str):
        if setting not in SETTINGS:
            raise ValueError(f"there is no setting {setting!r}; there are {', '.join(SETTINGS)}")
        return setting, SETTINGS[setting]
    return next((name for name, known in SETTINGS.items() if known == setting), setting.algorithm), setting


def _check(dtype: torch.dtype, seeds: list[int]) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {shown(dtype)}")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds must be different whole numbers >= 0, at least one; got {seeds[:10]}")


def _choose_form(form: str, setting: Setting, patterns: Patterns) -> str:
    choice("form", form, ("auto", *FORMS))
    if form != "auto":
        return form
    num_patterns, num_inputs = patterns.inputs.shape
    # the noise that a pre-activation gathers in an inner step, against its own size of about |x| |w|
    noisy = setting.has_inner_loop and setting.epsilon * math.sqrt(setting.inner_lr * num_inputs) > 1e-4
    return "direct" if noisy or num_patterns > 1.5 * num_inputs else "gram"


def _execute(job: Job, workers: int, save: Callable[[], None], progress: Progress) -> None:
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
        save()  # whatever went wrong, the last refresh is good


def _measure(job: Job, name: str, options: dict[str, Any]) -> Solutions:
    """Polish where that is asked for, count errors, and put everything together."""
    setting, patterns, restarts = job.setting, job.patterns, job.restarts
    weights = center(torch.stack([restart.weights for restart in restarts]))
    before = errors(weights, patterns.inputs, patterns.targets).tolist()
    polish_epochs, movement = [0] * len(restarts), [0.0] * len(restarts)
    wrong = [i for i, count in enumerate(before) if count and restarts[i].stop]
    if setting.polish_epochs and wrong:
        weights, steps = _polish(job, weights, wrong)
        for i, moved, epochs in steps:
            movement[i], polish_epochs[i] = moved, epochs
    # without a test set 0 / 0, which is NaN
    test = errors(weights, patterns.test_inputs, patterns.test_targets).double() / len(patterns.test_inputs)
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


def _polish(job: Job, weights: Tensor, wrong: list[int]) -> tuple[Tensor, list[tuple[int, float, int]]]:
    """Plain SGD with growing beta on solutions that have errors, until they have none."""
    setting = job.setting
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
    chosen = [Restart(job.restarts[i].seed, weights[i : i + 1].clone()) for i in wrong]
    polishing = Job(plain, job.patterns, chosen, job.dtype, job.form, job.refresh, purpose=POLISH)
    for group in polishing.groups(1):
        polishing.train(group)
    weights = weights.clone()
    steps = []
    for i, restart in zip(wrong, chosen, strict=True):
        moved = float((restart.weights[0] - weights[i]).square().sum()) / setting.hidden
        steps.append((i, moved, restart.epoch))
        weights[i] = restart.weights[0]
    return weights, steps
