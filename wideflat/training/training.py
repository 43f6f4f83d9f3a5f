"""One training loop for every preset and every algorithm.

An iteration takes one mini-batch for every replica, computes all gradients, couples the replicas and steps. What
differs between the algorithms is in :mod:`wideflat.training.algorithms`; what is on disk in
:mod:`wideflat.training.runs`.

Everything random about replica ``a`` (initial weights, order of the data, augmentation, dropout, Langevin noise) is a
function of the seed, of ``a`` and of the iteration, never of what other replicas did before it. So a run that was
killed goes on bit for bit, and a replica trains the same wherever it is computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wideflat
from wideflat.data import Augmentation, Batches, ImageData
from wideflat.environment import now
from wideflat.presets import Preset
from wideflat.progress import Progress
from wideflat.seeds import derive_seed
from wideflat.training.algorithms import Learner, Place
from wideflat.training.runs import Run

__all__ = ["Diverged", "Interrupted", "Options", "Training", "evaluate", "train"]


#: Images of 32x32 in a batch of the evaluation; fewer larger ones.
EVALUATION_BATCH = 500
#: Iterations between two looks at whether the training has diverged.
CHECK_EVERY = 50


class Diverged(RuntimeError):
    """The loss or the weights are no longer finite, or the loss has blown up."""


class Interrupted(KeyboardInterrupt):
    """The training was asked to stop, has saved its state, and can be resumed."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to compute, beside what (:class:`wideflat.presets.Preset`).

    Args:
        seed: Of everything random.
        limit_data: Train and test on at most this many images each.
        amp: ``off``, ``bf16`` or ``fp16`` (with gradient scaling): automatic mixed precision.
        compile: ``torch.compile`` the networks.
        channels_last: Memory format of images and convolutions; faster almost everywhere.
        evaluate_every: Epochs between two evaluations on the test set; the last epoch is always evaluated. A run may go
            on with another number.
        batch_norm_images: Training images that batch norm is refreshed on at the evaluations; the final model uses all.
        max_loss: The run has diverged when the mean training loss of an epoch exceeds this many times ``log(classes)``.
    """

    seed: int = 0
    limit_data: int | None = None
    amp: str = "off"
    compile: bool = False
    channels_last: bool = True
    evaluate_every: int = 1
    batch_norm_images: int = 10_000
    max_loss: float = 100.0

    def __post_init__(self) -> None:
        if self.amp not in ("off", "bf16", "fp16"):
            raise ValueError(f"amp must be off, bf16 or fp16, got {self.amp!r}")
        for field in ("evaluate_every", "batch_norm_images", "limit_data"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be >= 1, got {value}")


# ------------------------------------------------------------------------------------------------ evaluation


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Errors (fractions) and mean cross-entropy losses of networks on the same images, and of their ensemble."""

    errors: tuple[float, ...]
    losses: tuple[float, ...]
    ensemble_error: float


def evaluate(
    networks: Sequence[nn.Module],
    batches: Iterator[tuple[Tensor, Tensor]],
    votes: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
) -> Evaluation:
    """Error and loss of each network, and the error of the sum of their predicted probabilities.

    The networks are evaluated in eval mode, and are in the mode they were in afterwards.

    Args:
        networks: What to evaluate.
        batches: Images and their classes.
        votes: Adds the probabilities of networks elsewhere to those of the networks here.

    Example:
        >>> constant = nn.Linear(1, 2)
        >>> _ = nn.init.zeros_(constant.weight), constant.bias.data.copy_(torch.tensor([1.0, 0.0]))
        >>> batch = torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])
        >>> evaluate([constant], iter([batch])).errors
        (0.25,)
    """
    modes = [network.training for network in networks]
    for network in networks:
        network.eval()
    wrong: Tensor | int = 0
    loss: Tensor | int = 0
    ensemble: Tensor | int = 0
    count = 0
    try:
        with torch.inference_mode():
            for x, y in batches:
                logits = torch.stack([network(x).float() for network in networks])
                wrong = wrong + (logits.argmax(-1) != y).sum(-1)
                loss = loss + torch.stack([F.cross_entropy(each, y, reduction="sum") for each in logits]).double()
                ensemble = ensemble + (votes(logits.softmax(-1).sum(0)).argmax(-1) != y).sum()
                count += len(y)
    finally:
        for network, mode in zip(networks, modes, strict=True):
            network.train(mode)
    if not count:
        raise ValueError("there are no images to evaluate on")
    errors, losses = torch.as_tensor(wrong).tolist(), torch.as_tensor(loss).tolist()
    return Evaluation(tuple(n / count for n in errors), tuple(total / count for total in losses), int(ensemble) / count)


# ------------------------------------------------------------------------------------------------ the training


def augmentation(experiment: Preset, image_size: int | None = None) -> Augmentation:
    """What is done to the training images of an experiment.

    Args:
        experiment: The experiment.
        image_size: Of the data set, if it is known: images of the right size are not resized.

    Example:
        >>> from wideflat.presets import preset
        >>> augmentation(preset("cifar10-resnet18"), 32)
        Augmentation(padding=4, flip=True, policy=None, cutout=0, size=None)
    """
    size = None if experiment.image_size == image_size else experiment.image_size
    mean, std = experiment.pixel_mean, experiment.pixel_std
    if experiment.augmentation == "none":
        return Augmentation(size=size, mean=mean, std=std)
    policy = None if experiment.augmentation == "standard" else experiment.augmentation
    return Augmentation(experiment.padding, True, policy, experiment.cutout, size, mean, std)  # type: ignore[arg-type]


class Training:
    """A training in memory: networks, optimizer, streams of data, and how far it is.

    :func:`train` drives it and puts it on disk. On its own it serves experiments that want the loop in their hands.

    Args:
        experiment: What to train.
        data: The images.
        options: How to compute.
        device: Where.
        place: Where this process is among others that train the other replicas; by default all replicas are here.

    Example:
        >>> import dataclasses
        >>> from wideflat.data import ImageData, ImageSplit
        >>> from wideflat.presets import preset
        >>> pixels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        >>> part = ImageSplit(pixels, torch.arange(8) % 2)
        >>> data = ImageData.of("noise", tuple("0123456789"), part, part)
        >>> experiment = dataclasses.replace(preset("cifar10-smallconvnet", "esgd"), batch_size=4).with_epochs(3)
        >>> training = Training(experiment, data)
        >>> training.steps_per_epoch, training.total_steps      # 2 batches x L = 5 passes, 3 epochs
        (10, 30)
        >>> while training.step < training.total_steps:
        ...     loss = training.iterate()
        >>> training.epoch, training.at_epoch_end, bool(loss.isfinite())
        (3, True, True)
    """

    def __init__(
        self,
        experiment: Preset,
        data: ImageData,
        options: Options | None = None,
        device: torch.device | str = "cpu",
        place: Place | None = None,
    ) -> None:
        self.experiment, self.options = experiment, options or Options()
        self.device = torch.device(device)
        if data.num_classes != experiment.num_classes:
            raise ValueError(f"{data.name} has {data.num_classes} classes, {experiment.name} {experiment.num_classes}")
        if limit := self.options.limit_data:
            data = data.subset(min(limit, len(data.train)), min(limit, len(data.test)))
        self.data = data
        self.augmentation = augmentation(experiment, data.image_size)
        self.here = list(range(experiment.num_replicas)) if place is None else [place.index]
        self.streams = [self._stream("data", a) for a in self.here]
        forks = experiment.start == "fork"  # whose replicas have the mini-batches of the first until they part
        self._common_stream = self._stream("data", 0) if forks else self.streams[0]
        self.batches_per_pass = len(self.streams[0])
        self.steps_per_epoch = self.batches_per_pass * experiment.passes_per_epoch
        self.total_steps = experiment.epochs * self.steps_per_epoch
        self.step = 0
        self.learner = Learner(experiment, self._network, self.options.seed, place)
        if self.options.compile:
            for network in self.learner.networks:
                network.compile()
        self.scaler = torch.amp.GradScaler(self.device.type) if self.options.amp == "fp16" else None
        self._inner_distance: float | None = None
        self._start_sums()
        self._start()

    def _start(self) -> None:
        """Choose gamma0 and lay out the focusing."""
        self.learner.start(self._initial_losses, self._first_gradients, self.total_steps)

    # ---- one iteration

    def iterate(self) -> Tensor:
        """Train on one mini-batch for every replica; returns the mean loss, as a tensor that is not waited for."""
        learner = self.learner
        learner.set_progress(self.tau)
        if (self.step + 1) % self.steps_per_epoch == 0:
            self._inner_distance = learner.inner_distance()  # at the last step of an epoch w' is put back on w
        batches = [self._batch(a, self.step) for a in range(len(learner.networks))]
        losses: list[Tensor] = []

        def gradients() -> Tensor:
            """Put the gradients of all replicas into ``grad`` and return the mean loss."""
            learner.zero_grad()
            first = not losses  # SAM asks twice for the same batch; the first time is at the weights themselves
            for a, (x, y) in enumerate(batches):
                loss, logits = self._backward(a, x, y)
                if first:
                    losses.append(loss)
                    self._loss_sum += loss * len(y)
                    self._wrong += (logits.argmax(-1) != y).sum()
                    self._count += len(y)
            return torch.stack(losses).mean()

        loss = learner.update(gradients, self.scaler)
        self.step += 1
        return loss

    def _batch(self, a: int, step: int) -> tuple[Tensor, Tensor]:
        """The mini-batch of the ``a``-th replica here at iteration ``step``: a function of the two and of the seed."""
        parted = self.experiment.parted(step / self.steps_per_epoch)
        stream = self.streams[a] if parted else self._common_stream
        return self._to_format(*stream.batch(*divmod(step, self.batches_per_pass)))

    def _backward(self, a: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradient of replica ``a`` on a mini-batch to its ``grad``; the loss and the outputs."""
        self._seed_noise(self.here[a] if self.experiment.parted(self.tau) else 0)
        with self._autocast():
            logits = self.learner.networks[a](x)
            loss = F.cross_entropy(logits, y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach(), logits.detach()

    @property
    def tau(self) -> float:
        """How far the training is, in epochs."""
        return self.step / self.steps_per_epoch

    @property
    def images_per_step(self) -> float:
        """Training images that an iteration uses, on average over a pass."""
        return len(self.data.train) * self.experiment.num_replicas / self.batches_per_pass

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self.step // self.steps_per_epoch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last iteration was the last one of an epoch."""
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    def _network(self, a: int) -> nn.Module:
        """The network of replica ``a``, its weights a function of the seed and (of independent starts) of ``a``."""
        start = a if self.experiment.start == "independent" else 0
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.options.seed, "weights", start))
            network = self.experiment.build_model()
        network = network.to(self.device)
        return network.to(memory_format=torch.channels_last) if self.options.channels_last else network  # type: ignore[call-overload]

    def _stream(self, purpose: str, a: int, augment: Augmentation | None = None, **more: Any) -> Batches:
        settings = {"batch_size": self.experiment.batch_size, "device": self.device, **more}
        seed = derive_seed(self.options.seed, purpose)
        return Batches(self.data, augment=augment or self.augmentation, seed=seed, replica=a, **settings)

    def _to_format(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x if self.options.channels_last else x.contiguous()), y

    def _seed_noise(self, a: int) -> None:
        """Make dropout, stochastic depth and ShakeDrop a function of the seed, the replica and the iteration."""
        seed = derive_seed(self.options.seed, "noise", a, self.step)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self.options.amp == "off":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.options.amp == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype)

    def _initial_losses(self) -> list[float]:
        """The training loss of every replica before training, in eval mode, on at most 10,000 images as they are."""
        return list(evaluate(self.learner.networks, self._plain("train", limit=10_000)).losses)

    def _first_gradients(self, a: int) -> Callable[[], Tensor]:
        """A function that puts the gradients of replica ``a`` on its first, second, ... mini-batch into ``grad``."""
        steps = itertools.count()

        def gradients() -> Tensor:
            self.learner.zero_grad()
            return self._backward(a, *self._batch(a, next(steps)))[0]

        return gradients

    # ---- evaluation

    def evaluate(self, split: str = "test") -> Evaluation:
        """The center on the test set (or on the training set, without augmentation), batch norm refreshed."""
        return evaluate([self.center()], self._plain(split))

    @property
    def knows_replicas(self) -> bool:
        """Whether there are several replicas that can be evaluated here."""
        return len(self.learner.networks) > 1

    def evaluate_replicas(self) -> Evaluation:
        """Every replica on the test set as it is in training, and their ensemble."""
        return evaluate(self.learner.networks, self._plain("test"))

    def center(self, batch_norm_images: int | None = None) -> nn.Module:
        """A copy of the center (the network, w, or the barycenter), its batch norm refreshed where that is needed.

        Args:
            batch_norm_images: Training images to refresh it on, augmented as in training; None for the option's value.
        """
        center = self.learner.center()
        if self.learner.refreshes and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in center.modules()):
            stream = self._stream(
                "batch norm", 0, batch_size=min(self._evaluation_batch, len(self.data.train)), drop_last=True
            )
            count = math.ceil((batch_norm_images or self.options.batch_norm_images) / stream.batch_size)
            batches = (self._to_format(*stream.batch(0, i)) for i in range(min(count, len(stream))))
            wideflat.refresh_batch_norm(center, batches)
        return center

    @property
    def _evaluation_batch(self) -> int:
        """As many images as have the pixels of 500 of CIFAR's, but no fewer than a training batch has."""
        fitting = round(EVALUATION_BATCH * (32 / self.experiment.image_size) ** 2)
        return min(EVALUATION_BATCH, max(fitting, self.experiment.batch_size))

    def _plain(self, split: str, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of a part in their order, without augmentation."""
        stream = self._stream(
            "plain", 0, self.augmentation.evaluation(), split=split, shuffle=False, batch_size=self._evaluation_batch
        )
        count = len(stream) if limit is None else min(len(stream), math.ceil(limit / stream.batch_size))
        return (self._to_format(*stream.batch(0, i)) for i in range(count))

    # ---- the figures of an epoch

    def _start_sums(self) -> None:
        self._loss_sum = torch.zeros((), device=self.device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self._count = 0
        self._inner_distance = None

    def close_epoch(self, evaluate: bool = True) -> dict[str, Any]:
        """The row of ``metrics.jsonl`` of the epoch that has just ended; a new one begins.

        Args:
            evaluate: With the errors on the test set.
        """
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step,
            "passes": self.epoch * self.experiment.passes_per_epoch * self.experiment.num_replicas,
            **self.learner.figures(),
            "train_loss": float(self._loss_sum) / self._count,
            "train_error": int(self._wrong) / self._count,
        }
        if self._inner_distance is not None:
            row["inner_distance"] = self._inner_distance
        if evaluate:
            center = self.evaluate()
            row |= {"test_error": center.errors[0], "test_loss": center.losses[0]}
            if self.knows_replicas:
                replicas = self.evaluate_replicas()
                row |= {"replica_test_errors": list(replicas.errors), "ensemble_test_error": replicas.ensemble_error}
        self._start_sums()
        return row

    def check(self) -> None:
        """Raise :class:`Diverged` if the loss of this epoch or a weight is not finite, or the loss has blown up."""
        where = f"at iteration {self.step} (epoch {self.tau:.2f})"
        loss = float(self._loss_sum) / max(self._count, 1)
        limit = self.options.max_loss * math.log(self.experiment.num_classes)
        if not math.isfinite(loss):
            raise Diverged(f"the training loss is {loss} {where}")
        if loss > limit:
            raise Diverged(f"the training loss has grown to {loss:.3g} {where} (limit {limit:.3g})")
        for a, network in zip(self.here, self.learner.networks, strict=True):
            for name, parameter in network.named_parameters():
                if not torch.isfinite(parameter).all():
                    raise Diverged(f"{name} of replica {a} is not finite {where}")

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on. The streams of data are functions of ``step``."""
        return {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "sums": {
                "loss": self._loss_sum,
                "wrong": self._wrong,
                "count": self._count,
                "inner_distance": self._inner_distance,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a training with the same experiment, data and options stood."""
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        sums = state["sums"]
        self._loss_sum, self._wrong = sums["loss"].to(self.device), sums["wrong"].to(self.device)
        self._count, self._inner_distance = sums["count"], sums["inner_distance"]


# ------------------------------------------------------------------------------------------------ on disk


def train(
    experiment: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options | None = None,
    *,
    device: torch.device | str = "cpu",
    snapshots: Sequence[int] = (),
    checkpoint_minutes: float = 5.0,
    tensorboard: bool = True,
    progress: bool = True,
    on_epoch: Callable[[Training, dict[str, Any]], None] | None = None,
    until: Callable[[dict[str, Any]], bool] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Run:
    """Train an experiment in the run directory ``out``; go on where it stopped if it is there already.

    Killed at any moment and started again, it ends with the same weights and the same metrics, bit for bit, as if it
    had not been disturbed (on the same machine with as many threads).

    Args:
        experiment: A preset, or what ``dataclasses.replace`` makes of one.
        out: The run directory.
        data: The images, see :func:`wideflat.data.load`.
        options: How to compute.
        device: Where.
        snapshots: Epochs at whose end the center is kept, for the flatness figures (0: before training).
        checkpoint_minutes: A state is saved after every epoch, and after so many minutes within one.
        tensorboard: Write TensorBoard event files.
        progress: Show progress.
        on_epoch: Called at the end of every epoch with the training and its row of metrics; what it adds to the row is
            saved with it.
        until: Ends the training early: after the first epoch whose row of metrics it is true for.
        say: Where messages go: resumed, fell back to an older state, a line for each epoch.

    Raises:
        Interrupted: After SIGINT or SIGTERM; the state is saved.
        Diverged: If the loss or a weight is not finite or the loss has blown up; the last good state is kept.
        wideflat.training.runs.RunInUse: If another process trains in ``out``.
    """
    options = options or Options()
    with run_held(experiment, out, data, options, say) as (run, tell):
        if run.result() is not None:
            return run
        training = Training(experiment, data, options, device)
        state = run.restore(tell)
        if state is not None:
            training.load_state_dict(state)
            tell(f"resumed {run.path} at epoch {training.tau:.2f} of {experiment.epochs}")
        elif 0 in snapshots:
            _save_snapshot(run, training, {"epoch": 0})
        try:
            with _stop_requests() as stop, _tensorboard(run, training.epoch, tensorboard) as write_scalars:
                title = f"{experiment.name} {experiment.algorithm}"
                bar = Progress(title, training.total_steps, progress, before=training.step)
                clock = _Clock(training, checkpoint_minutes)
                with bar:
                    rows = run.metrics()
                    ended = until is not None and bool(rows) and until(rows[-1])
                    while training.step < training.total_steps and not ended:
                        loss = training.iterate()
                        if training.at_epoch_end:
                            training.check()
                            clock.trained()
                            due = training.epoch % options.evaluate_every == 0 or training.step == training.total_steps
                            row = training.close_epoch(evaluate=due)
                            if on_epoch is not None:
                                on_epoch(training, row)
                            run.append("metrics", row)
                            run.append("timing", clock.row())
                            write_scalars(row)
                            if training.epoch in snapshots:
                                _save_snapshot(run, training, row)
                            run.save_checkpoint(training.step, training.state_dict())
                            clock.saved()
                            bar.update(training.step, **_figures(row))
                            say(f"epoch {row['epoch']}/{experiment.epochs}  {_text(row)}")
                            ended = until is not None and until(row)
                        else:
                            if training.step % CHECK_EVERY == 0:
                                training.check()
                            if clock.show_is_due():
                                bar.update(training.step, loss=float(loss))
                            if stop or clock.save_is_due():
                                training.check()
                                run.save_checkpoint(training.step, training.state_dict())
                                clock.saved()
                        if stop and training.step < training.total_steps and not ended:
                            raise Interrupted(
                                f"stopped by {stop[0].name} at epoch {training.tau:.2f} of {experiment.epochs}; "
                                f"{run.path} is saved: start the same command again to go on"
                            )
        except Interrupted as interruption:
            run.append("events", {"time": now(), "event": str(interruption)})
            raise
        except Diverged as reason:
            message = (
                f"stopped because {reason}. {run.path} keeps the last good state and all metrics up to it. Try a "
                "smaller --lr (or --gamma0) with another --out."
            )
            run.append("events", {"time": now(), "event": message})
            raise Diverged(message) from None
        result = _finish(run, training)
        tell(f"finished {run.path}: test error {100 * result['test_error']:.2f} %")
    return run


def configuration(experiment: Preset, data: ImageData, options: Options) -> dict[str, Any]:
    """All that decides what a training comes to: the configuration of its run."""
    about = {"name": data.name, "train": len(data.train), "test": len(data.test), "altered": bool(data.altered)}
    return {"experiment": experiment.to_dict(), "options": dataclasses.asdict(options), "data": about}


@contextlib.contextmanager
def run_held(
    experiment: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options,
    say: Callable[[str], object],
    **about: Any,
) -> Iterator[tuple[Run, Callable[[str], None]]]:
    """The run directory of a training, made if need be and held, and a function that says something and keeps it there.

    Args:
        experiment: What is trained.
        out: The run directory.
        data: The images.
        options: How it is computed.
        say: Where messages go.
        **about: More to note about this start.
    """
    run = Run.create(out, configuration(experiment, data, options))

    def tell(message: str) -> None:
        run.append("events", {"time": now(), "event": message})
        say(message)

    with run.locked():
        if run.result() is not None:
            say(f"{run.path} is finished already")
        else:
            run.record_environment(data_source=data.source, **about)
        yield run, tell


def _finish(run: Run, training: Training) -> dict[str, Any]:
    """Save the final model: the center, batch norm refreshed on all training images, with its errors."""
    center = training.center(len(training.data.train))
    result = _result(training, center)
    run.save_model(center, result)
    return result


def _result(training: Training, center: nn.Module) -> dict[str, Any]:
    """What is said of the final model: its errors, and those of the replicas where they are known."""
    test = evaluate([center], training._plain("test"))
    fit = evaluate([center], training._plain("train"))
    result: dict[str, Any] = {
        "epoch": training.epoch,
        "test_error": test.errors[0],
        "test_loss": test.losses[0],
        "train_error": fit.errors[0],
        "train_loss": fit.losses[0],
    }
    if training.knows_replicas:
        replicas = training.evaluate_replicas()
        result["replica_test_errors"] = list(replicas.errors)
        result["ensemble_test_error"] = replicas.ensemble_error
    return result


def _save_snapshot(run: Run, training: Training, row: dict[str, Any]) -> None:
    run.save_model(training.center(len(training.data.train)), row, epoch=training.epoch)


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[signal.Signals]]:
    """A list that SIGINT (Ctrl-C) and SIGTERM are put into; the second one of them interrupts at once."""
    received: list[signal.Signals] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield received
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Clock:
    """When to save and when to show, and how fast the training is."""

    def __init__(self, training: Training, checkpoint_minutes: float) -> None:
        self.training = training
        self.interval = 60 * checkpoint_minutes
        self.last_save = self.last_show = self.start = time.monotonic()
        self.first_step = training.step

    def save_is_due(self) -> bool:
        return time.monotonic() - self.last_save > self.interval

    def saved(self) -> None:
        self.last_save = time.monotonic()
        if self.training.at_epoch_end:
            self.start, self.first_step = self.last_save, self.training.step

    def show_is_due(self) -> bool:
        if time.monotonic() - self.last_show < 0.5:
            return False
        self.last_show = time.monotonic()
        return True

    def trained(self) -> None:
        """The iterations of an epoch are done; what follows is evaluation and saving."""
        self.end = time.monotonic()

    def row(self) -> dict[str, Any]:
        seconds, done = self.end - self.start, time.monotonic() - self.end
        images = (self.training.step - self.first_step) * self.training.images_per_step
        return {
            "epoch": self.training.epoch,
            "time": now(),
            "seconds": round(seconds, 3),
            "images_per_second": round(images / seconds, 1),
            "evaluation_seconds": round(done, 3),
        }


@contextlib.contextmanager
def _tensorboard(run: Run, epoch: int, enabled: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes the numbers of a row as TensorBoard scalars over the epoch."""
    if not enabled:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield lambda row: None
        return
    writer = SummaryWriter(run.path / "tensorboard", purge_step=epoch + 1 if epoch else None)

    def write(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, list):
                for a, item in enumerate(value):
                    writer.add_scalar(f"{name}/{a}", item, row["epoch"])
            elif name != "epoch" and value is not None:
                writer.add_scalar(name, value, row["epoch"])
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


def _figures(row: dict[str, Any]) -> dict[str, object]:
    """What the progress line shows of a row."""
    shown: dict[str, object] = {"loss": row["train_loss"], "train": f"{100 * row['train_error']:.2f}%"}
    if "test_error" in row:
        shown["test"] = f"{100 * row['test_error']:.2f}%"
    for name in ("distance", "gamma", "lr"):
        if row.get(name) is not None:
            shown[name] = row[name]
    return shown


def _text(row: dict[str, Any]) -> str:
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in _figures(row).items())
