"""A training in memory: networks, streams of data, one iteration, its state.

An iteration takes one mini-batch for every replica, computes all gradients, couples the replicas and steps. What
differs between the algorithms is in :mod:`wideflat.algorithms`; epochs and disk are in :mod:`wideflat.training.loop`.

Everything random about replica ``a`` (initial weights, order of the data, augmentation, dropout, Langevin noise) is a
function of the seed, of ``a`` and of the iteration, never of what other replicas did before it. So a run that was
killed goes on bit for bit, and a replica trains the same wherever it is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wideflat.batch_norm import refresh_batch_norm
from wideflat.checks import instance
from wideflat.checks.doors import asks
from wideflat.data import Augmentation, Batches, ImageData
from wideflat.presets import Preset
from wideflat.seeds import derive_seed
from wideflat.training.company import Alone, Company
from wideflat.training.learner import Learner
from wideflat.training.options import Options
from wideflat.training.precision import Overflow, Precision
from wideflat.training.scores import Scores, evaluate
from wideflat.training.small_images import SmallImages

__all__ = ["Diverged", "Training", "augmentation"]

#: Images of 32x32 in a batch of the evaluation; fewer larger ones.
EVALUATION_BATCH = 500
#: How often the scale of float16 is halved for one mini-batch before the gradients are given up.
HALVINGS = 32


class Diverged(RuntimeError):
    """The loss or the weights are no longer finite, or the loss has blown up."""


def augmentation(preset: Preset, image_size: int | None = None) -> Augmentation:
    """What is done to the training images of a preset.

    Args:
        preset: The preset.
        image_size: Of the data set, if it is known: images of the right size are not resized.

    Example:
        >>> from wideflat.presets import preset
        >>> augmentation(preset("cifar10-resnet18"), 32)
        Augmentation(padding=4, flip=True, policy=None, cutout=0, size=None)
    """
    size = None if preset.image_size == image_size else preset.image_size
    mean, std = preset.pixel_mean, preset.pixel_std
    if preset.augmentation == "none":
        return Augmentation(size=size, mean=mean, std=std)
    policy = None if preset.augmentation == "standard" else preset.augmentation
    return Augmentation(preset.padding, True, policy, preset.cutout, size, mean, std)  # type: ignore[arg-type]


class Training:
    """A training in memory: networks, optimizer, streams of data, and how far it is.

    :func:`wideflat.training.train` drives it and puts it on disk. On its own it serves experiments that want the loop
    in their hands.

    Args:
        preset: What to train.
        data: The images.
        options: How to compute.
        device: Where.
        company: Who trains the other replicas; by default all are here. What is said about the whole training (metrics,
            states, the center) is said in every process, after asking the others: all must ask at the same time.
        saved: A state to go on from.

    Example:
        >>> import dataclasses
        >>> from wideflat.data import ImageData, ImageSplit
        >>> from wideflat.presets import preset
        >>> pixels = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        >>> part = ImageSplit(pixels, torch.arange(8) % 2)
        >>> data = ImageData.of("noise", tuple("0123456789"), part, part)
        >>> cell = dataclasses.replace(preset("cifar10-smallconvnet", "esgd"), batch_size=4).with_epochs(3)
        >>> training = Training(cell, data)
        >>> training.steps_per_epoch, training.total_steps      # 2 batches x L = 5 passes, 3 epochs
        (10, 30)
        >>> while training.step < training.total_steps:
        ...     loss = training.iterate()
        >>> training.epoch, training.at_epoch_end, bool(loss.isfinite())
        (3, True, True)
    """

    @asks
    def __init__(
        self,
        preset: Preset,
        data: ImageData,
        options: Options | None = None,
        device: torch.device | str = "cpu",
        company: Company | None = None,
        saved: dict[str, Any] | None = None,
    ) -> None:
        self.preset, self.options, self.company = preset, options or Options(), company or Alone()
        self.device = torch.device(device)
        if data.num_classes != preset.num_classes:
            raise ValueError(f"{data.name} has {data.num_classes} classes, {preset.name} {preset.num_classes}")
        self.data = data = data.limited(self.options.limit_data)
        self.augmentation = augmentation(preset, data.image_size)
        self.learner = Learner(preset, self._network, self.options.seed, self.company)
        self.streams = [self._stream("data", a) for a in self.learner.local_replicas]
        forks = preset.start == "fork"  # whose replicas have the mini-batches of the first until they part
        self._common_stream = self._stream("data", 0) if forks else self.streams[0]
        self.batches_per_pass = len(self.streams[0])
        self.steps_per_epoch = self.batches_per_pass * preset.passes_per_epoch
        self.total_steps = preset.epochs * self.steps_per_epoch
        self.step = 0
        #: Whether an iteration is under way: the step that it will have been is not counted yet.
        self.iterating = False
        if self.options.compile:
            for network in self.learner.networks:
                network.compile()
        self.shares = [self.company.share(network) for network in self.learner.networks]
        self.precision = Precision(self.options.amp, self.device)
        #: A compiler does its own convolutions.
        self.small_images = contextlib.nullcontext() if self.options.compile else SmallImages()
        self._inner_distance: float | None = None
        self._start_sums()
        self.company.begin(self, saved)

    def begin(self) -> None:
        """Choose gamma0 and lay out the focusing."""
        self.learner.start(self.total_steps, self._initial_losses, self._first_gradients)

    def resume(self, saved: dict[str, Any] | None = None) -> None:
        """Lay out the focusing and go on from a state, which brings its gamma0."""
        self.learner.start(self.total_steps)
        if saved is not None:
            self.load_state_dict(saved)

    # ---- one iteration

    def iterate(self) -> Tensor:
        """Train on one mini-batch for every replica; returns the mean loss, as a tensor that is not waited for."""
        self.iterating = True
        try:
            loss = self._iterate()
        finally:
            self.iterating = False
        self.step += 1
        return loss

    def _iterate(self) -> Tensor:
        learner = self.learner
        learner.set_rates(self.tau)
        if learner.coupling is not None and self.precision.scaler is None:  # an overflow would leave out the coupling
            learner.coupling.prefetch()  # the barycenter travels while the gradients are computed
        if (self.step + 1) % self.steps_per_epoch == 0:
            self._inner_distance = learner.inner_distance()  # at the last step of an epoch w' is put back on w
        batches = [self._batch(a, self.step) for a in range(len(learner.networks))]
        losses: list[Tensor] = []

        def gradients() -> Tensor:
            """Put the gradients of all replicas into ``grad`` and return the mean loss."""
            learner.zero_grad()
            first = not losses  # SAM asks twice for the same batch; the first time is at the weights themselves
            fit = True
            for a, (x, y) in enumerate(batches):
                loss, logits, finite = self._backward(a, x, y)
                fit = fit and finite
                if first:
                    losses.append(self.shares[a].own(loss))
                    self._loss_sum += losses[-1] * len(y)
                    self._wrong += (logits.argmax(-1) != y).sum()
                    self._count += len(y)
            self._refuse_overflow(fit)
            return torch.stack(losses).mean()

        taken = learner.update(gradients)
        self.precision.update(taken)
        return torch.stack(losses).mean()

    def _batch(self, a: int, step: int) -> tuple[Tensor, Tensor]:
        """The mini-batch of the ``a``-th replica here at iteration ``step`` (this process's part of it): a function of
        the two and of the seed.
        """
        parted = self.preset.parted(step / self.steps_per_epoch)
        stream = self.streams[a] if parted else self._common_stream
        return self.shares[a].share(*self._to_format(*stream.batch(*divmod(step, self.batches_per_pass))))

    def _backward(self, a: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Put the gradient of replica ``a`` on a mini-batch into its ``grad``, in its own size.

        Returns:
            The loss, the outputs, and whether all gradients here are finite (looked at with float16 only).
        """
        self._seed_noise(self.learner.local_replicas[a] if self.preset.parted(self.tau) else 0)
        share = self.shares[a]
        with self.precision.autocast(), self.small_images:
            logits = share(x)
            loss = share.loss(logits, y)
        self.precision.backward(loss)
        finite = self.precision.unscale(self.learner.networks[a].parameters())
        return loss.detach(), logits.detach(), finite

    def _refuse_overflow(self, fit: bool) -> None:
        """Raise `Overflow` if a gradient has overflown, here or where steps are taken together with those here."""
        if self.precision.scaler is not None and not self.company.all(fit):
            raise Overflow(f"a gradient of iteration {self.step} does not fit into float16")

    @property
    def tau(self) -> float:
        """How far the training is, in epochs."""
        return self.step / self.steps_per_epoch

    @property
    def images_per_step(self) -> float:
        """Training images that an iteration uses, on average over a pass, as far as it is known here."""
        replicas = self.preset.num_replicas if self.company.sees_all else len(self.learner.networks)
        return len(self.data.train) * replicas / self.batches_per_pass

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
        start = a if self.preset.start == "independent" else 0
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.options.seed, "weights", start))
            network = self.preset.build_model()
        network = network.to(self.device)
        return network.to(memory_format=torch.channels_last) if self.options.channels_last else network  # type: ignore[call-overload]

    def _stream(self, purpose: str, a: int, augment: Augmentation | None = None, **more: Any) -> Batches:
        settings = {"batch_size": self.preset.batch_size, "device": self.device, **more}
        seed = derive_seed(self.options.seed, purpose)
        return Batches(self.data, augment=augment or self.augmentation, seed=seed, replica=a, **settings)

    def _to_format(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x if self.options.channels_last else x.contiguous()), y

    def _seed_noise(self, a: int) -> None:
        """Make dropout, stochastic depth and ShakeDrop a function of the seed, the replica and the iteration."""
        seed = derive_seed(self.options.seed, "noise", a, self.step, *self.company.own_noise)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    # ---- the automatic gamma0

    def _initial_losses(self) -> list[float]:
        """The training loss of every replica before training, in eval mode, on at most 10,000 images as they are."""
        return list(evaluate(self.learner.networks, self._plain("train", limit=10_000)).losses)

    def _first_gradients(self, a: int) -> Callable[[], Tensor]:
        """A function that puts the gradients of replica ``a`` on its first, second, ... mini-batch into ``grad``."""
        steps = itertools.count()

        def gradients() -> Tensor:
            batch = self._batch(a, next(steps))
            for _ in range(HALVINGS):
                self.learner.zero_grad()
                loss, _, finite = self._backward(a, *batch)
                try:
                    self._refuse_overflow(finite)
                except Overflow:
                    self.precision.update(fits=False)
                else:
                    return self.shares[a].mean(loss)
            raise Diverged("the gradients of the initial weights are not finite, however small the scale of float16")

        return gradients

    # ---- evaluation

    def evaluate(self, split: str = "test") -> Scores:
        """The center on the test set (or on the training set, without augmentation), batch norm refreshed."""
        return self.scores_of(self.center(), split)

    def scores_of(self, network: nn.Module, split: str = "test") -> Scores:
        """A network on the images of a part, without augmentation."""
        return evaluate([network], self._plain(split))

    @property
    def evaluates_replicas(self) -> bool:
        """Whether there are several replicas, and all can be asked."""
        return self.preset.num_replicas > 1 and self.company.sees_all

    def evaluate_replicas(self) -> Scores:
        """Every replica on the test set as it is in training, and their ensemble."""
        own = evaluate(self.learner.networks, self._plain("test"), votes=self.company.votes)
        parts = self.company.of_replicas((own.errors, own.losses))
        errors, losses = (tuple(itertools.chain(*each)) for each in zip(*parts, strict=True))
        return Scores(errors, losses, own.ensemble_error)

    def center(self, batch_norm_images: int | None = None) -> nn.Module:
        """A copy of the center (the network, w, or the barycenter), its batch norm refreshed where that is needed.

        Args:
            batch_norm_images: Training images to refresh it on, augmented as in training; None for the option's value.
        """
        center = self.learner.center()
        has_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in center.modules())
        if self.learner.needs_batch_norm and has_batch_norm:
            stream = self._stream(
                "batch norm", 0, batch_size=min(self._evaluation_batch, len(self.data.train)), drop_last=True
            )
            count = math.ceil((batch_norm_images or self.options.batch_norm_images) / stream.batch_size)
            batches = (self._to_format(*stream.batch(0, i)) for i in range(min(count, len(stream))))
            refresh_batch_norm(center, batches)
        return center

    @property
    def _evaluation_batch(self) -> int:
        """As many images as have the pixels of 500 of CIFAR's, but no fewer than a training batch has."""
        fitting = round(EVALUATION_BATCH * (32 / self.preset.image_size) ** 2)
        return min(EVALUATION_BATCH, max(fitting, self.preset.batch_size))

    def _plain(self, split: str, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The images of a part in their order, without augmentation."""
        stream = self._stream(
            "plain", 0, self.augmentation.evaluation(), split=split, shuffle=False, batch_size=self._evaluation_batch
        )
        count = len(stream) if limit is None else min(len(stream), math.ceil(limit / stream.batch_size))
        return (self._to_format(*stream.batch(0, i)) for i in range(count))

    # ---- the metrics of an epoch

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
        own = (float(self._loss_sum), int(self._wrong), self._count, self._inner_distance)
        loss, wrong, count, inner = zip(*self.company.gather(own), strict=True)
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step,
            "passes": self.epoch * self.preset.passes_per_epoch * self.preset.num_replicas,
            **self.learner.metrics(),
            "train_loss": sum(loss) / sum(count),
            "train_error": sum(wrong) / sum(count),
        }
        if self._inner_distance is not None:
            row["inner_distance"] = sum(inner) / len(inner)
        if evaluate:
            center = self.evaluate()
            row |= {"test_error": center.errors[0], "test_loss": center.losses[0], **self.replica_errors()}
        self._start_sums()
        return row

    def replica_errors(self) -> dict[str, Any]:
        """The test errors of the replicas and of their ensemble; nothing where there is one or not all can be asked."""
        if not self.evaluates_replicas:
            return {}
        replicas = self.evaluate_replicas()
        return {"replica_test_errors": list(replicas.errors), "ensemble_test_error": replicas.ensemble_error}

    def check(self) -> None:
        """Raise :class:`Diverged` in all processes if the loss of this epoch or a weight is not finite, or the loss has
        blown up, in any of them.
        """
        if reason := next(filter(None, self.company.gather(self._divergence())), None):
            raise Diverged(f"{reason} at iteration {self.step} (epoch {self.tau:.2f})")

    def _divergence(self) -> str | None:
        """What has diverged in this process, if anything."""
        loss = float(self._loss_sum) / max(self._count, 1)
        limit = self.options.max_loss * math.log(self.preset.num_classes)
        if not math.isfinite(loss):
            return f"the training loss is {loss}"
        if loss > limit:
            return f"the training loss has grown to {loss:.3g} (limit {limit:.3g})"
        for a, network in zip(self.learner.local_replicas, self.learner.networks, strict=True):
            for name, parameter in network.named_parameters():
                if not torch.isfinite(parameter).all():
                    return f"{name} of replica {a} is not finite"
        return None

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the training depends on, whoever has it. The streams of data are functions of
        ``step``.
        """
        sums = {"loss": self._loss_sum, "wrong": self._wrong, "count": self._count}
        all_sums = self.company.gather(sums)
        parts = {"parts": all_sums} if len(all_sums) > 1 else {}  # added up in another order, the last digit is another
        learners = self.company.of_replicas(self.learner.state_dict())
        return {
            "step": self.step,
            "learner": self.learner.joined(learners),
            "scaler": self.precision.state_dict(),
            "sums": {
                **{name: sum(each[name] for each in all_sums) for name in sums},
                "inner_distance": self._inner_distance,
                **parts,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a training with the same preset, data and options stood, in whatever company."""
        needed = {"step", "learner", "scaler", "sums"}
        if absent := sorted(needed.difference(instance("saved", state, Mapping, "what state_dict() gave"))):
            raise ValueError(f"the state of a training has no {' and no '.join(absent)}: it is that of something else")
        self.step = state["step"]
        self.learner.load_state_dict(state["learner"])
        self.precision.load_state_dict(state["scaler"])
        self._start_sums()
        self._inner_distance = state["sums"]["inner_distance"]
        sums, company = state["sums"], self.company
        if len(sums.get("parts", ())) == company.size:  # everyone has its own again
            sums = sums["parts"][company.place]
        elif not company.writes:  # other processes than before: those of the epoch so far stay with one of them
            return
        self._loss_sum, self._wrong = sums["loss"].to(self.device), sums["wrong"].to(self.device)
        self._count = sums["count"]
