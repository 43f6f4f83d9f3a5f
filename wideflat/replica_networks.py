"""The replicas of a network, as one module: made, evaluated each on its own mini-batch, and averaged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader

from wideflat.centered import warn_off_center
from wideflat.checks import a_kind, choice, flag, function, instance, network, shown, whole
from wideflat.checks.calls import called
from wideflat.distributed.group import InProcess, set_to_mean
from wideflat.kernels.shards import is_sharded
from wideflat.replica_batches import ReplicaBatches

__all__ = ["Replicas"]

#: More replicas in one process are never meant.
MOST_REPLICAS = 10_000


def _count(batches: Any) -> int:
    """How many mini-batches there are."""
    try:
        return len(batches)
    except Exception:  # it has none
        raise TypeError(f"batches must be a sequence with one for each replica, got {shown(batches)}") from None


class Replicas(nn.Module):
    """The replicas w_1, ..., w_y of a network, as one module that any torch optimizer can train.

    Train on the *sum* of the replicas' losses, each on its own mini-batch. With a mean over replicas every gradient is
    y times smaller while weight decay is not, which silently multiplies weight decay by y.

    Args:
        make_model: Makes a network; called once a replica. The replicas start from independent initialisations,
            provided that it does not seed the generator itself.
        num_replicas: y.
        independent: False starts all replicas from the first one's weights. `ReplicaCoupling.initial_gamma` does not
            exist then, since the replicas coincide. (Copies of a network that was trained for a while before they part:
            ``Replicas(lambda: copy.deepcopy(trained), 3)``.)
        vectorize: Evaluate all replicas at once with `torch.func.vmap` (True), one after the other (False), or decide
            (``"auto"``): at once on an accelerator, if the network allows it; one after the other on the CPU, where
            the convolutions of vmap are slower. The results are the same, except that active dropout draws other
            numbers, so ``"auto"`` does not vectorise that.
        share_frozen: Keep parameters that are not trained (``requires_grad`` False), such as the base under LoRA
            adapters, once for all replicas. They must be equal.

    Note on LoRA:
        The barycenter averages weights. The update of an adapter is a product B A, and mean(B) mean(A) is not mean(B A)
        as long as the replicas differ; they agree when the replicas have collapsed. To average the updates themselves,
        merge each adapter into a base of its own first.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> replicas = Replicas(lambda: nn.Linear(2, 1), num_replicas=3)
        >>> replicas(torch.ones(3, 8, 2)).shape  # three mini-batches of eight
        torch.Size([3, 8, 1])
        >>> w = torch.stack([model.weight for model in replicas])
        >>> torch.allclose(replicas.barycenter().weight, w.mean(0))
        True
    """

    #: What all replicas share, by identity; it has no distance and no mean.
    shared: frozenset[nn.Parameter] = frozenset()

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        num_replicas: int = 3,
        *,
        independent: bool = True,
        vectorize: bool | str = "auto",
        share_frozen: bool = False,
    ) -> None:
        super().__init__()
        _check_maker(make_model)
        num_replicas = whole("num_replicas", num_replicas, 1, MOST_REPLICAS)
        if not isinstance(vectorize, bool) and not (isinstance(vectorize, str) and vectorize == "auto"):
            raise ValueError(f"vectorize must be True, False or 'auto', got {shown(vectorize)}")
        share_frozen, independent = flag("share_frozen", share_frozen), flag("independent", independent)
        first = network(make_model(), "what make_model returns")
        frozen = [p for p in first.parameters() if not p.requires_grad] if share_frozen else []
        kept = {id(p): p for p in frozen}
        others = []
        for _ in range(num_replicas - 1):
            other = make_model() if independent else copy.deepcopy(first, dict(kept))
            _check_alike(other, first)
            if share_frozen:  # at once, so that no more than two copies are there
                _share_frozen(other, first)
            others.append(other)
        self.models = nn.ModuleList([first, *others])
        self.shared = frozenset(frozen)
        self.vectorize = vectorize
        self._fails_to_vectorize = False

    @property
    def num_replicas(self) -> int:
        """The number of replicas, y."""
        return len(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.models)

    def __getitem__(self, index: int) -> nn.Module:
        if isinstance(index, slice):
            return self.models[index]
        number = whole("the number of a replica", index, -len(self.models))
        if number >= len(self.models):  # what ends a loop over them
            raise IndexError(f"there are {len(self.models)} replicas, got {number}")
        return self.models[number]

    def forward(self, batches: Tensor | Sequence[Tensor]) -> Tensor:
        """The outputs of each replica on its own mini-batch, stacked.

        Args:
            batches: A mini-batch for each replica: a sequence of y, or a tensor whose first dimension is y. For one
                mini-batch x for all: ``x.expand(y, *x.shape)``.
        """
        if _count(batches) != len(self.models):
            raise ValueError(
                f"expected a mini-batch for each of the {len(self.models)} replicas, got {_count(batches)}; "
                "for one mini-batch x for all of them pass x.expand(num_replicas, *x.shape)"
            )
        if self.vectorize is True:
            return self._forward_at_once(batches)
        if self.vectorize == "auto" and self._may_vectorize():
            try:
                return self._forward_at_once(batches)
            except RuntimeError as error:
                self._fails_to_vectorize = True
                reason = str(error).splitlines()[0]
                warnings.warn(f"replicas run one after the other, vmap cannot run this network: {reason}", stacklevel=2)
        answers = [called("the network", model, batch) for model, batch in zip(self.models, batches, strict=True)]
        return torch.stack(answers)

    def _may_vectorize(self) -> bool:
        if self._fails_to_vectorize or len(self.models) == 1 or next(self.parameters()).device.type == "cpu":
            return False
        return not any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in self.models[0].modules())

    def _forward_at_once(self, batches: Tensor | Sequence[Tensor]) -> Tensor:
        stacked = batches if isinstance(batches, Tensor) else torch.stack(list(batches))
        parameters = _stack([dict(model.named_parameters()) for model in self.models])
        buffers = _stack([dict(model.named_buffers()) for model in self.models])

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Tensor) -> Tensor:
            return functional_call(self.models[0], (parameters, buffers), (batch,))

        outputs = torch.func.vmap(one, randomness="different")(parameters, buffers, stacked)
        with torch.no_grad():  # running statistics that the forward pass has moved
            for name, values in buffers.items():
                for model, value in zip(self.models, values.unbind(), strict=True):
                    model.get_buffer(name).copy_(value)
        return outputs

    def batches(self, loader: DataLoader[Any], *, seed: int = 0) -> ReplicaBatches:
        """Mini-batches for all replicas: each goes through the loader's data in a shuffled order of its own.

        >>> data = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(6, 1), torch.zeros(6, 1))
        >>> replicas = Replicas(lambda: nn.Linear(1, 1), num_replicas=2)
        >>> for batches in replicas.batches(DataLoader(data, batch_size=3)):
        ...     replicas.loss(batches, F.mse_loss).backward()
        """
        return ReplicaBatches(loader, len(self.models), seed=seed)

    def loss(
        self, batches: Sequence[Any], criterion: Callable[[Any, Any], Tensor] = F.cross_entropy, **settings: Any
    ) -> Tensor:
        """The *sum* of the replicas' losses, each on its own mini-batch: what `ReplicaCoupling` adds its pull to.

        Args:
            batches: One for each replica: pairs of inputs and targets; or mappings, with which a network is called
                whole and of whose result the ``loss`` is taken, as those of Hugging Face return it.
            criterion: The loss of outputs and targets, for pairs.
            **settings: Further arguments of ``criterion``.
        """
        function("criterion", criterion)
        if (count := _count(batches)) != len(self.models):
            raise ValueError(f"expected a mini-batch for each of the {len(self.models)} replicas, got {count}")
        batches = list(batches)
        if isinstance(batches[0], Mapping):
            pairs = zip(self.models, batches, strict=True)
            losses = [_own_loss(called("the network", model, **_named(batch))) for model, batch in pairs]
            return torch.stack(losses).sum()
        if not all(isinstance(batch, (tuple, list)) and len(batch) == 2 for batch in batches):
            raise TypeError(f"a mini-batch must be a pair of inputs and targets, or a mapping, got {shown(batches[0])}")
        outputs = self([inputs for inputs, _ in batches])
        pairs = zip(outputs, (target for _, target in batches), strict=True)
        losses = [called("criterion", criterion, out, target, **settings) for out, target in pairs]
        return torch.stack(losses).sum()

    def ensemble(self, inputs: Tensor | Mapping[str, Any]) -> Tensor:
        """The class probabilities, averaged over the replicas.

        The outputs are logits, or probabilities already (rows that sum to 1), which are averaged as they are. Classes
        are in the last axis, in outputs of four axes and more (images) in the second.

        Args:
            inputs: A tensor; or a mapping, with which each network is called whole. Of results that are not tensors the
                ``logits`` are taken.

        Example:
            >>> replicas = Replicas(lambda: nn.Linear(2, 4), num_replicas=2)
            >>> replicas.ensemble(torch.ones(5, 2)).sum(1).allclose(torch.ones(5))
            True
        """
        if isinstance(inputs, Mapping):
            named = _named(inputs)
            outputs = torch.stack([_logits(called("the network", model, **named)) for model in self.models])
        elif self.vectorize is True or (self.vectorize == "auto" and self._may_vectorize()):
            outputs = _logits(self(inputs.expand(len(self.models), *inputs.shape)))
        else:
            inputs = instance("inputs", inputs, Tensor, "a tensor, or a mapping of what the networks take")
            outputs = torch.stack([_logits(called("the network", model, inputs)) for model in self.models])
        if outputs.dim() < 3 or (outputs.dim() == 3 and outputs.shape[-1] == 1):
            raise ValueError(
                f"ensemble() needs the outputs of several classes, and each network has one output an example (shape "
                f"{tuple(outputs.shape[1:])}): average them yourself, for example replicas(inputs.expand(y, "
                "*inputs.shape)).sigmoid().mean(0)"
            )
        axis = -1 if outputs.dim() <= 4 else 2
        sums = outputs.detach().sum(axis, dtype=torch.float32)
        probabilities = bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())
        return (outputs if probabilities else outputs.softmax(axis)).mean(0)

    @torch.no_grad()
    def barycenter(self, buffers: str = "average") -> nn.Module:
        """A network with the mean w_bar of the replicas' parameters.

        Its batch-norm statistics are not those of its weights: call `wideflat.refresh_batch_norm` on it.

        Args:
            buffers: ``"average"`` averages the buffers that are real numbers and keeps the first replica's others;
                ``"first"`` keeps all of the first replica's.
        """
        choice("buffers", buffers, ("average", "first"))
        if any(is_sharded(p) for p in self.parameters()):
            raise ValueError(
                "the networks are sharded, so there is no copy of them on one rank: evaluate or save one of them "
                "within `with coupling.at_barycenter():`"
            )
        warn_off_center(self.parameters())
        center = copy.deepcopy(self.models[0], {id(p): p for p in self.shared})
        center.zero_grad(set_to_none=True)
        set_to_mean(self.own(center), [self.own(model) for model in self.models])
        if buffers == "average":
            real = [[b for b in model.buffers() if b.is_floating_point()] for model in self.models]
            set_to_mean([b for b in center.buffers() if b.is_floating_point()], real)
        return center

    def own(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of a replica that it does not share with the others."""
        return [p for p in network(model).parameters() if p not in self.shared]

    def distances(self) -> Tensor:
        """d(w_a, w_bar) of each replica: half the squared distance to the barycenter."""
        return InProcess(self).distances()


def _check_maker(make_model: object) -> None:
    if isinstance(make_model, nn.Module) or not callable(make_model):
        raise TypeError(
            "make_model must be a function that makes a network, so that every replica gets an initialisation of "
            f"its own, for example lambda: resnet18(num_classes=10); got {a_kind(make_model)}"
        )


def _check_alike(other: nn.Module, first: nn.Module) -> None:
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in (other, first)]
    if shapes[0] != shapes[1]:
        raise ValueError("make_model must make networks of one architecture; their parameters differ")
    if other is first:
        raise ValueError("make_model must make a new network at every call; it returned the same one twice")


def _share_frozen(other: nn.Module, first: nn.Module) -> None:
    """Put the frozen parameters of one network into another one, wherever they are in it."""
    theirs = dict(first.named_parameters(remove_duplicate=False))
    for path, module in other.named_modules():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            shared = theirs[f"{path}.{name}" if path else name]
            if p is shared or (p.requires_grad and shared.requires_grad):
                continue
            if p.requires_grad != shared.requires_grad or not torch.equal(p, shared):
                raise ValueError(
                    f"share_frozen=True keeps one copy of what is not trained, and {path}.{name} differs between "
                    "replicas: freeze the same parameters in all, and start them from one base (load it in make_model, "
                    "or seed it)"
                )
            setattr(module, name, shared)


def _named(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in inputs:
        instance("the name of an input", name, str)
    return inputs


def _logits(result: Any) -> Tensor:
    """What a network returned, or the ``logits`` in it."""
    if isinstance(result, Tensor):
        return result
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    if logits is None:
        raise TypeError(f"expected a tensor, or something with logits, from the network; got {type(result).__name__}")
    return logits


def _own_loss(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is None:
        raise TypeError(
            "a network that is called with a mapping must return its loss, as those of Hugging Face do when there are "
            f"labels in it; got {type(result).__name__} without one"
        )
    return loss


def _stack(members: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}
