"""What one training is: data set, architecture, algorithm, every hyper-parameter, and which of them are ours."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from wideflat import algorithms
from wideflat.checks import flag, instance, number, numbers_of, perhaps, shown, whole
from wideflat.checks.calls import takes
from wideflat.checks.doors import asks
from wideflat.checks.records import in_json, reading
from wideflat.data.catalogue import FACTS
from wideflat.data.images import ImageData
from wideflat.data.own import OWN
from wideflat.presets.networks import chosen_network, listed_network
from wideflat.schedules import Schedule

__all__ = ["ALGORITHMS", "COLUMNS", "Preset", "nearest", "one_of"]

#: The columns of Table 1, in the paper's order.
COLUMNS = ("sgd", "rsgd", "esgd", "rsgdxy")

#: Every algorithm that a row can be trained with, and what it is.
ALGORITHMS: dict[str, str] = {name: algorithm.words for name, algorithm in algorithms.ALGORITHMS.items()}

#: Fields that are one of a few words.
CHOICES: dict[str, tuple[str, ...]] = {
    "augmentation": ("none", "standard", "autoaugment", "fast-autoaugment"),
    "optimizer": ("sgd", "rmsprop-tf", "rmsprop"),
    "start": ("independent", "one", "fork"),
    "coupling": ("gradient", "proximal"),
    "batch_norm": ("refresh", "gathered"),
    "gamma_clock": ("step", "cycle", "epoch"),
    "focusing": ("exponential", "cosine", "constant"),
    "replica_focusing": ("exponential", "cosine", "constant"),
}

#: Fields that are whole numbers from 1 on, and the most that can be meant.
COUNTS = {
    "epochs": 10**6,
    "batch_size": 10**7,
    "num_replicas": 10**4,
    "fork_passes": 10**6,
    "period": 10**9,
    "inner_steps": 10**6,
    "num_classes": 10**6,
    "image_size": 4096,
}


def one_of(field: str, value: str, known: Any) -> None:
    """Refuse a value that is not one of the known ones."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{field} must be one of {', '.join(known)}, got {shown(value)}{perhaps(value, known)}")


@asks
def nearest(name: str, known: Collection[str]) -> str:
    """Which of the known names was perhaps meant, and all of them; for the end of an error message."""
    near = difflib.get_close_matches(name, known, n=1)
    return (f"Did you mean {near[0]!r}? " if near else "") + f"There are {', '.join(sorted(known))}."


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


@dataclasses.dataclass(frozen=True)
class Preset:
    """One cell of Table 1, or an experiment made from one with ``dataclasses.replace``.

    Args:
        name: The row: data set and architecture.
        algorithm: The column, or another of :data:`ALGORITHMS`.
        dataset: ``cifar10``, ``cifar100``, ``tiny-imagenet``, ``fashion-mnist`` or ``dress-coat``; ``folder``, ``npz``
            or ``own`` for data of your own (:mod:`wideflat.data.own`).
        model: A function of :mod:`wideflat.models`, or ``module:function`` for your own; called with ``num_classes``.
        model_arguments: More arguments of that function, as (name, value) pairs.
        num_classes: Number of classes.
        image_size: Side of the images that the network sees; they are resized where the data set has another.
        padding: Zero padding of the random crops.
        augmentation: ``standard`` (crops and flips), ``autoaugment`` (CIFAR-10 policy) or ``fast-autoaugment``
            (ImageNet policies), each after the standard one.
        cutout: Side of the square that is cut out, 0 for none.
        pixel_mean: What is subtracted from each channel (pixels from 0 to 1); None for the training set's mean.
        pixel_std: What each channel is divided by; None for the training set's deviation.
        epochs: Length of the training; see :mod:`wideflat.presets`.
        batch_size: Images in a mini-batch, of one replica.
        optimizer: ``sgd``, ``rmsprop-tf`` (:class:`wideflat.baselines.TensorFlowRMSprop`) or ``rmsprop`` (torch's,
            which runs of earlier versions have), of every replica and of the inner loop.
        lr: The initial learning rate eta (of the outer loop for Entropy-SGD).
        schedule: What ``lr`` is multiplied with over the training.
        momentum: Momentum, of both loops for Entropy-SGD.
        nesterov: Nesterov's form of it.
        weight_decay: L2 penalty, of both loops for Entropy-SGD.
        smoothing: Of RMSprop: the decay of its mean square.
        stabiliser: Of RMSprop: what is added to the mean square (``rmsprop-tf``) or to its root (``rmsprop``).
        num_replicas: y.
        start: Where the replicas start: ``independent`` initialisations, ``one`` initialisation for all, or a ``fork``:
            one initialisation and the same mini-batches for all, without attraction, until they part.
        fork_passes: Of a fork: passes over the data before the replicas part.
        period: K, the iterations from one coupling to the next.
        period_changes: (epoch, K) pairs: from that epoch on, K is that.
        coupling: How the replicas of Replicated-SGD attract each other: ``gradient``, as in Algorithm 2, or
            ``proximal``, which is stable for any strength; see :class:`wideflat.ReplicaCoupling`.
        batch_norm: Statistics of a center that training never visited: ``refresh`` gathers them anew on training
            images; ``gathered`` takes those of the training as they are (of replicas: their mean).
        inner_lr: eta'.
        inner_steps: L.
        epsilon: Amplitude of the Langevin noise.
        alpha: Weight of the past in the running mean mu.
        gamma0: The first gamma (the largest one for cosine focusing); None for the automatic one.
        gamma_factor: What gamma is multiplied with from the first to the last iteration.
        gamma_clock: When gamma changes: at every ``step``, every ``cycle`` of L steps, or every ``epoch``.
        gamma_in_lr: Of Entropy-SGD: the outer learning rate is ``lr`` times the present gamma.
        focusing: ``exponential``, ``cosine`` or ``constant``.
        replica_gamma0: Of Parle: the first gamma between replicas, as ``gamma0`` is that within each; None for the
            automatic one.
        replica_gamma_factor: The same for ``gamma_factor``.
        replica_focusing: The same for ``focusing``.
        rho: Of SAM: the radius of the ball.
        paper_error: Test error in Table 1, in percent; None where the table is blank.
        paper_spread: Its spread in Table 1; None where none is printed.
        paper_gamma1: The paper's gamma_1, kept as printed. It has no consistent clock and is not used.
        as_coded: Whether this is the cell as copies of the authors' program have it, not as the paper prints it.
        notes: (field, reason) for each value that is ours and not the paper's.
        coded: (field, reason) for each value that is the program's and not the paper's.
        from_file: Whether the values come from a file, which may name networks of this package only.
    """

    name: str
    algorithm: str
    dataset: str
    model: str
    num_classes: int
    image_size: int
    padding: int
    epochs: int
    batch_size: int
    lr: float
    schedule: Schedule
    weight_decay: float
    model_arguments: tuple[tuple[str, Any], ...] = ()
    augmentation: str = "standard"
    cutout: int = 0
    pixel_mean: tuple[float, ...] | None = None
    pixel_std: tuple[float, ...] | None = None
    optimizer: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = True
    smoothing: float = 0.99
    stabiliser: float = 1e-8
    num_replicas: int = 1
    start: str = "independent"
    fork_passes: int = 3
    period: int = 10
    period_changes: tuple[tuple[float, int], ...] = ()
    coupling: str = "gradient"
    batch_norm: str = "refresh"
    inner_lr: float = 0.0
    inner_steps: int = 1
    epsilon: float = 0.0
    alpha: float = 0.0
    gamma0: float | None = 0.0
    gamma_factor: float = 1.0
    gamma_clock: str = "step"
    gamma_in_lr: bool = False
    focusing: str = "constant"
    replica_gamma0: float | None = 0.0
    replica_gamma_factor: float = 1.0
    replica_focusing: str = "constant"
    rho: float = 0.0
    paper_error: float | None = None
    paper_spread: float | None = None
    paper_gamma1: float | None = None
    as_coded: bool = False
    notes: tuple[tuple[str, str], ...] = ()
    coded: tuple[tuple[str, str], ...] = ()
    from_file: bool = dataclasses.field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for field, known in CHOICES.items():
            one_of(field, getattr(self, field), known)
        one_of("dataset", self.dataset, (*FACTS, *OWN))
        for field, most in COUNTS.items():
            object.__setattr__(self, field, whole(field, getattr(self, field), 1, most))
        for field in ("nesterov", "gamma_in_lr", "as_coded", "from_file"):
            object.__setattr__(self, field, flag(field, getattr(self, field)))
        algorithms.check(self)
        for field in ("lr", "weight_decay", "inner_lr", "epsilon", "rho", "padding", "cutout"):
            number(field, getattr(self, field), 0)
        for field in ("momentum", "alpha"):
            if number(field, getattr(self, field), 0, 1) == 1:
                raise ValueError(f"{field} must be in [0, 1), got 1")
        self._check_records()
        for change in self.period_changes:
            whole(f"the period from epoch {change[0]} on", change[1], 1)
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {shown(self.schedule)}")
        if not isinstance(self.model, str):
            raise TypeError(f'model must be a name, or "module:function", got {shown(self.model)}')
        self._check_gamma()
        self._check_pixels()

    def _check_records(self) -> None:
        instance("name", self.name, str, "a text")
        for field in ("paper_error", "paper_spread", "paper_gamma1"):
            if getattr(self, field) is not None:
                number(field, getattr(self, field))
        for field in ("model_arguments", "period_changes", "notes", "coded"):
            pairs = instance(field, getattr(self, field), tuple, "a tuple of pairs")
            if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                raise ValueError(f"{field} must be a tuple of pairs, got {shown(pairs)}")
            in_json(field, pairs)  # as which a run keeps it

    def _check_gamma(self) -> None:
        for field in ("gamma0", "replica_gamma0"):
            if getattr(self, field) is not None:
                number(f"{field}, unless it is None for the automatic one,", getattr(self, field), 0)
        for field in ("gamma_factor", "replica_gamma_factor"):
            number(field, getattr(self, field), above=0)
        focused = {gamma.of: f"{gamma.prefix}gamma0" for gamma in self.record.gammas}
        if self.gamma_in_lr and "optimizer" not in focused:
            raise ValueError(f"gamma_in_lr is for the outer step of Entropy-SGD, not for {self.algorithm}")
        between = focused.get("coupling", "gamma0")
        if self.start != "independent" and getattr(self, between) is None:
            raise ValueError(
                f"{between} cannot be automatic with start={self.start!r}: it is the loss over the distance of the "
                f"replicas, and these start at one point; give a number, such as {between}=0.001"
            )

    def _check_pixels(self) -> None:
        for field in ("pixel_mean", "pixel_std"):
            value, facts = getattr(self, field), FACTS.get(self.dataset)
            channels = (1, 3) if facts is None else (facts.channels,)  # data of one's own are grey or in colour
            if value is not None and (len(found := numbers_of(field, value)) not in channels or min(found) <= 0):
                count = " or ".join(map(str, channels))
                raise ValueError(
                    f"{field} must have a number > 0 for each of the {count} channels of {self.dataset}, got {value}"
                )

    # ---- what follows from the fields

    @property
    def record(self) -> algorithms.Algorithm:
        """All that there is to know of the algorithm."""
        return algorithms.ALGORITHMS[self.algorithm]

    @property
    def passes_per_epoch(self) -> int:
        """How often a replica goes over the training set in an epoch: L for Entropy-SGD, else 1."""
        return self.inner_steps

    @property
    def passes(self) -> int:
        """Passes over the training set, of all replicas together."""
        return self.epochs * self.passes_per_epoch * self.num_replicas

    @asks
    def parted(self, tau: float) -> bool:
        """Whether the replicas go their own ways at epoch ``tau``: always, but for the first passes of a fork."""
        return self.start != "fork" or tau * self.passes_per_epoch >= self.fork_passes

    @asks
    def period_at(self, tau: float) -> int:
        """K at epoch ``tau``."""
        period = self.period
        for epoch, changed in self.period_changes:
            if tau >= epoch:
                period = changed
        return period

    def with_epochs(self, epochs: int) -> Preset:
        """The same training over another number of epochs: learning rates, gamma and period are rescaled with it.

        Example:
            >>> from wideflat.presets import preset
            >>> short = preset("cifar10-smallconvnet").with_epochs(30)
            >>> short.epochs, short.schedule.drops
            (30, (15.0, 22.5))
        """
        scale = whole("epochs", epochs, 1, COUNTS["epochs"]) / self.epochs
        return dataclasses.replace(
            self,
            epochs=epochs,
            schedule=self.schedule.rescaled(epochs),
            period_changes=tuple((epoch * scale, period) for epoch, period in self.period_changes),
        )

    @asks
    def with_data(self, data: ImageData) -> Preset:
        """The same training on data of your own: as many classes and channels as these have.

        Args:
            data: What :func:`wideflat.data.from_folder` and its like give.
        """
        kind = data.name.partition(":")[0]
        others = tuple(pair for pair in self.model_arguments if pair[0] != "in_channels")
        known = takes(self._constructor())
        channels = (("in_channels", data.channels),) if "in_channels" in known and data.channels != 3 else ()
        return dataclasses.replace(
            self,
            dataset=kind if kind in OWN else "own",
            num_classes=data.num_classes,
            model_arguments=(*others, *channels),
            notes=(*self.notes, ("dataset", "data of one's own: the settings are those of another data set")),
        )

    def with_stem(self, stem: str) -> Preset:
        """The same with another beginning of the network: ``cifar``, one 3x3 convolution, or ``imagenet``, a 7x7 one of
        stride 2 and a max pool.

        ``cifar`` is what the functions of :mod:`wideflat.models` do by themselves, and is written as no argument:
        as in the runs of earlier versions, which so remain the same experiment.

        Example:
            >>> from wideflat.presets import preset
            >>> preset("cifar10-resnet18").model_arguments
            (('stem', 'imagenet'),)
            >>> preset("cifar10-resnet18").with_stem("cifar").model_arguments
            ()
        """
        one_of("stem", stem, ("cifar", "imagenet"))
        if "stem" not in takes(self._constructor()):
            raise ValueError(f"{self.model} has one beginning only: a stem is for resnet18, resnet50 and densenet121")
        others = tuple(pair for pair in self.model_arguments if pair[0] != "stem")
        return dataclasses.replace(
            self,
            model_arguments=others if stem == "cifar" else (*others, ("stem", stem)),
            notes=tuple(note for note in self.notes if note[0] != "model_arguments"),
        )

    def with_dropout(self, dropout: float) -> Preset:
        """The same with another probability of dropout, where the network has one.

        Example:
            >>> from wideflat.presets import preset
            >>> preset("cifar10-smallconvnet").with_dropout(0.5).model_arguments
            (('dropout', 0.5),)
        """
        number("dropout", dropout, 0, 1)
        if "dropout" not in takes(self._constructor()):
            raise ValueError(f"{self.model} has no dropout: that is for smallconvnet, efficientnet_b0 and vgg3x512")
        others = tuple(pair for pair in self.model_arguments if pair[0] != "dropout")
        return dataclasses.replace(self, model_arguments=(*others, ("dropout", float(dropout))))

    def _constructor(self) -> Callable[..., nn.Module]:
        """The function that ``model`` names."""
        return listed_network(self.model) if self.from_file else chosen_network(self.model)

    def build_model(self) -> nn.Module:
        """A new network of this row, with the weights of torch's current random state.

        Raises:
            ValueError: If the preset was read from a file and ``model`` is no network of this package.
        """
        build = self._constructor()
        arguments = dict(self.model_arguments)
        if "image_size" in takes(build):
            arguments.setdefault("image_size", self.image_size)
        try:
            return build(num_classes=self.num_classes, **arguments)
        except TypeError as error:
            if not self.from_file:
                raise
            raise ValueError(f"the model arguments {arguments} do not fit {self.model}: {error}") from None

    # ---- to and from JSON

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values for JSON."""
        values = dataclasses.asdict(self)
        del values["from_file"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preset:
        """The inverse of :meth:`to_dict`, also after a round trip through JSON.

        The values are taken as those of a file, which names no code: :meth:`build_model` only makes networks of this
        package then, whatever ``model`` says.

        Example:
            >>> import json
            >>> from wideflat.presets import preset
            >>> cell = preset("cifar10-resnet110", "rsgd")
            >>> Preset.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
            True
        """
        known = {field.name for field in dataclasses.fields(cls)} - {"from_file"}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"a preset has no {', '.join(unknown)}. {nearest(unknown[0], known)}")
        schedule = instance("schedule", values.get("schedule"), dict, "a dictionary")
        with reading("preset"):
            values = {name: _tuples(value) for name, value in values.items()}
            values["schedule"] = Schedule(**{name: _tuples(value) for name, value in schedule.items()})
        return cls(**values, from_file=True)
