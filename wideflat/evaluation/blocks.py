"""The data of a measurement, cut into blocks: what one call of the network evaluates, and what shares one noise."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from wideflat.checks import MOST_ELEMENTS, shareable, shown, whole
from wideflat.checks.streams import ending
from wideflat.evaluation.origins import comes_from, on_host, small, unwritten_copy
from wideflat.seeds import derive_seed

__all__ = ["Block", "Blocks"]


#: More are not held in an order of our own: their places alone would take a gigabyte.
MOST_EXAMPLES = 10**8
#: Values of a tensor, evenly over it, by which data are recognised.
FINGERPRINT = 2**16


@dataclass
class Block:
    """One batch: its place, its content, its number of examples."""

    index: int
    batch: Any
    size: int


class Blocks:
    """A data set as a sequence of blocks that is the same in every pass.

    Args:
        data: One of

            * tensors or NumPy arrays in memory: a tuple ``(inputs, targets)``, where inputs may be several,
              ``([x1, x2], targets)``, a dictionary of tensors, a ``TensorDataset``;
            * a map-style data set (``__len__`` and ``__getitem__``), collated as a ``DataLoader`` does;
            * a list of batches, a ``DataLoader``, or any other iterable of batches. Its order and its augmentation are
              made the same in every pass by seeding torch, NumPy and Python before each.
        batch_size: Examples a block, where the blocks are made here.
        seed: Draws which example goes into which block.
        augment: Applied to the inputs of every batch ``(inputs, targets)`` (to a batch of another form as a whole),
            freshly in every pass.
        in_order: Leave the examples in their order where the blocks are made here, for a network to which their company
            matters; else it is drawn which example goes into which block.

    Attributes:
        indexed: Whether a block can be had without those before it.
        count: Number of blocks; for an iterable it is known after the first pass.

    Example:
        >>> blocks = Blocks((torch.arange(5.0), torch.zeros(5)), batch_size=2, seed=0)
        >>> blocks.count, [block.size for block in blocks.visit(0, [0, 1, 2])]
        (3, [2, 2, 1])
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        seed: int = 0,
        augment: Callable[[Any], Any] | None = None,
        in_order: bool = False,
    ) -> None:
        self._seed = seed
        self._augment = augment
        self._tensors: Any = None
        self._dataset: Any = None
        self._batches: Any = None
        self.count: int | None = None
        self.examples: int | None = None  # known beforehand where the blocks are made here
        self.sharded = False
        self.one_pass = False
        if isinstance(data, TensorDataset):
            data = data.tensors if len(data.tensors) > 1 else data.tensors[0]
        if _in_memory(data):
            self._tensors = as_tensors(data)
            total = len(tree_leaves(data)[0])
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            self._dataset = data
            total = len(data)  # type: ignore[arg-type]
        elif isinstance(data, (list, tuple)):
            self._batches = data
            self.count = total = len(data)
        elif isinstance(data, Iterable) and getattr(data, "ndim", None) != 0:  # a tensor of one number says that it is
            self._batches = data
            total = 1
            self.sharded = isinstance(getattr(data, "sampler", None), DistributedSampler)
            self.one_pass = _is_iterator(data) if not isinstance(data, DataLoader) else False
        else:
            raise TypeError(
                "data must be tensors (inputs, targets), a data set, a DataLoader or an iterable of batches; "
                f"got {shown(data)}"
            )
        if total == 0:
            raise ValueError(f"data is empty: {type(data).__name__} of length 0")
        self.indexed = not isinstance(self._batches, Iterable) or isinstance(self._batches, (list, tuple))
        if self._batches is None:
            whole("the number of examples", total, 1, MOST_EXAMPLES)
            self.count = -(-total // whole("batch_size", batch_size, 1))
            generator = torch.Generator().manual_seed(derive_seed(seed, "blocks"))
            order = torch.arange(total) if in_order else torch.randperm(total, generator=generator)
            self._parts = order.tensor_split(self.count)
            self.examples = total
        #: Whether every pass sees exactly the same numbers; data that change them are found out in the second.
        self.fixed = augment is None
        self._seen: dict[int, int] = {}
        self._on_host: dict[int, tuple[int, Tensor]] = {}

    @property
    def in_memory(self) -> bool:
        """Whether the data are tensors in memory."""
        return self._tensors is not None

    @property
    def bytes(self) -> int:
        """Size of the tensors in memory."""
        return sum(
            leaf.numel() * leaf.element_size() for leaf in tree_leaves(self._tensors) if isinstance(leaf, Tensor)
        )

    @property
    def augmented(self) -> bool:
        """Whether something is applied to every batch."""
        return self._augment is not None

    def visit(
        self, number: int, order: Sequence[int] | None = None, mine: Callable[[int], bool] | None = None
    ) -> Generator[Block, None, None]:
        """The blocks of pass ``number``, an iterator of :class:`Block`.

        Args:
            number: Which pass.
            order: Which blocks, in which order; None for all of them as they come.
            mine: Which of them this process evaluates; default all.
        """
        mine = mine or (lambda index: True)
        if self.indexed:
            assert self.count is not None
            return self._visit_indexed(number, [j for j in (order or range(self.count)) if mine(j)])
        return self._visit_iterable(number, mine)

    def first(self) -> Block:
        """The first block, for looking at."""
        if not self.one_pass:
            visit = self.visit(0, [0] if self.indexed else None)
            try:
                return next(visit)
            finally:
                visit.close()
        batches = iter(self._batches)
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"data is empty: {type(self._batches).__name__} gave no batch")
        self._batches = itertools.chain([batch], batches)
        return self._finish(0, batch, 0)

    def _visit_indexed(self, number: int, order: Sequence[int]) -> Generator[Block, None, None]:
        for j in order:
            if self._tensors is not None:
                part = self._parts[j]
                batch = tree_map(lambda tensor, part=part: self._part(tensor, part), self._tensors)
                yield self._finish(j, batch, number)
                continue
            seed_everything(derive_seed(self._seed, "data", j))
            if self._batches is not None:
                batch = self._batches[j]
            else:
                batch = default_collate([self._dataset[i] for i in self._parts[j].tolist()])
            self._compare(j, batch)
            yield self._finish(j, batch, number)

    def _part(self, tensor: Tensor, part: Tensor) -> Tensor:
        """Some examples of a tensor in memory. Labels on a device are fetched once for all blocks, if need be."""
        found = tensor[part.to(tensor.device)]
        if tensor.device.type == "cpu" or tensor.is_inference() or not small(tensor):
            return found
        version = tensor._version

        def on_the_host() -> Tensor | None:
            if id(tensor) not in self._on_host or self._on_host[id(tensor)][0] != tensor._version:
                self._on_host[id(tensor)] = tensor._version, tensor.detach().cpu()
            return self._on_host[id(tensor)][1][part] if tensor._version == version else None

        return comes_from(found, on_the_host)

    def _visit_iterable(self, number: int, mine: Callable[[int], bool]) -> Generator[Block, None, None]:
        seed_everything(derive_seed(self._seed, "data"))
        generator = getattr(self._batches, "generator", None)
        before = generator.get_state() if isinstance(generator, torch.Generator) else None
        if generator is not None and before is not None:
            generator.manual_seed(derive_seed(self._seed, "data"))
        j = -1
        try:
            for j, batch in enumerate(ending("data", self._batches)):
                self._compare(j, batch)
                if mine(j):
                    yield self._finish(j, batch, number)
        finally:
            if generator is not None and before is not None:
                generator.set_state(before)
        if j < 0:
            raise ValueError(f"data is empty: {type(self._batches).__name__} gave no batch in pass {number + 1}")
        if self.count is None:
            self.count = j + 1
        elif self.count != j + 1:
            raise ValueError(f"data gave {self.count} batches in the first pass and {j + 1} in pass {number + 1}")

    def _compare(self, j: int, batch: Any) -> None:
        """Find out data that differ from pass to pass: an augmentation with random numbers that cannot be seeded."""
        found = _fingerprint(batch)
        if self._seen.setdefault(j, found) != found:
            self.fixed = False

    def _finish(self, j: int, batch: Any, number: int) -> Block:
        batch = as_tensors(batch)
        if self._augment is not None:
            seed_everything(derive_seed(self._seed, "augment", number, j))
            pair = isinstance(batch, (tuple, list)) and len(batch) == 2
            batch = (self._augment(batch[0]), batch[1]) if pair else self._augment(batch)
        return Block(j, batch, batch_length(batch))


def _is_iterator(data: Iterable[Any]) -> bool:
    """Can it be gone through but once?"""
    try:
        return iter(data) is data
    except Exception as error:  # of the user's
        raise TypeError(f"data cannot be gone through: {type(error).__name__}: {error!s:.200}") from error


def batch_length(batch: Any) -> int:
    """Number of examples of a batch: the length of its targets, else of its first tensor.

    Inputs may have another axis first (time, or all steps of a packed sequence).
    """
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
    for leaf in [*([batch[1]] if pair else ()), *tree_leaves(batch)]:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    raise TypeError(f"a batch must contain a tensor whose first axis counts the examples; got {type(batch).__name__}")


def as_tensors(batch: Any) -> Any:
    """The batch with tensors in the place of NumPy arrays, and a plain dictionary in that of any other mapping.

    Example:
        >>> as_tensors((np.ones((2, 3)), np.array([0, 1])))[1]
        tensor([0, 1])
    """
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    try:
        return tree_map(lambda leaf: _tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)
    except RecursionError:
        raise TypeError(f"a batch is nested too deeply, or contains itself: {shown(batch)}") from None


def _tensor(array: np.ndarray) -> Tensor:
    if array.size > MOST_ELEMENTS:
        raise ValueError(f"data must have at most {MOST_ELEMENTS} numbers, got {shown(array)}")
    if array.dtype.kind not in "biuf":
        raise TypeError(f"data must be numbers, got an array of {array.dtype} and shape {array.shape}")
    return torch.from_numpy(shareable(array))


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        there = leaf.to(device, non_blocking=True)
        known = there is not leaf and leaf.device.type == "cpu" and small(leaf)
        return comes_from(there, unwritten_copy(leaf)) if known else there

    return tree_map(moved, batch)


def repeated(batch: Any, times: int) -> Any:
    """The batch with all its examples ``times`` over."""
    if times == 1:
        return batch
    return _made(batch, lambda leaf: leaf.repeat(times, *(1,) * (leaf.dim() - 1)))


def truncated(batch: Any, size: int) -> Any:
    """The first ``size`` examples of a batch."""
    return tree_map(lambda leaf: leaf[:size] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)


def chosen(batch: Any, examples: Sequence[int], size: int) -> Any:
    """The given examples of a batch of ``size``, in this order."""

    def pick(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.size(0) != size:
            return leaf
        return leaf[torch.tensor(examples, device=leaf.device)]

    return tree_map(pick, batch)


def cloned(batch: Any) -> Any:
    """The batch in memory of its own."""
    return _made(batch, Tensor.clone)


def _made(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with something made of each of its tensors, of which it is known where they come from."""

    def made(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        host = on_host(leaf)
        return function(leaf) if host is leaf else comes_from(function(leaf), lambda: function(host))

    return tree_map(made, batch)


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python, so that augmentation inside a data set repeats."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also prepare devices that are not in use
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 # transforms of other libraries draw from the global generator
    random.seed(seed)


def random_state(device: torch.device) -> tuple[Any, ...]:
    """The random states of torch, NumPy, Python and the device."""
    own = torch.get_device_module(device).get_rng_state(device) if device.type in ("cuda", "xpu") else None
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), device, own  # noqa: NPY002


def moved(a: tuple[Any, ...], b: tuple[Any, ...]) -> list[bool]:
    """Which of the random states are others in ``b``: numbers have been drawn, or a seed was set."""
    numpy = a[1][2:] != b[1][2:] or not np.array_equal(a[1][1], b[1][1])
    own = a[4] is not None and not torch.equal(a[4], b[4])
    return [not torch.equal(a[0], b[0]), numpy, a[2] != b[2], own]


def restore_random_state(state: tuple[Any, ...]) -> None:
    """Random states as they were."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    random.setstate(state[2])
    if state[4] is not None:
        torch.get_device_module(state[3]).set_rng_state(state[4], state[3])


def _in_memory(data: Any) -> bool:
    """Whether ``data`` is tensors with one common first axis, and not batches."""
    leaves = _held(data)
    if not leaves or not all(isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0 for leaf in leaves):
        return False
    for leaf in leaves:
        _refuse_what_cannot_be_cut(leaf)
    if len({len(leaf) for leaf in leaves}) != 1:
        raise ValueError(f"tensors in memory must have the same length, got {[tuple(leaf.shape) for leaf in leaves]}")
    return True


def _refuse_what_cannot_be_cut(leaf: Tensor | np.ndarray) -> None:
    if isinstance(leaf, UninitializedParameter):
        raise TypeError("data must be tensors with contents, got a parameter without a shape")
    if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
        raise TypeError(
            f"data in memory must be dense tensors, which can be cut into batches; got one of layout {leaf.layout}."
            " Give them as batches, a list of (inputs, targets) or a DataLoader, or .to_dense()"
        )


def _held(data: Any) -> list[Any]:
    """What would be the tensors of the examples, if they are given as a whole."""
    if isinstance(data, (Tensor, np.ndarray)):
        return [data]
    if isinstance(data, Mapping):
        return list(data.values())
    if _several_inputs(data):
        return [*(data[0].values() if isinstance(data[0], Mapping) else data[0]), data[1]]
    return list(data) if isinstance(data, tuple) else []


def _several_inputs(data: Any) -> bool:
    """Whether ``data`` is ``([x1, x2, ...], targets)``, and not two batches, of which only one would have targets."""
    return (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and isinstance(data[0], (tuple, list, Mapping))
        and isinstance(data[1], (Tensor, np.ndarray))
    )


def _fingerprint(batch: Any) -> int:
    """A number that another batch, or the same in another order, does not have, from some of its values."""
    found = 0
    for leaf in tree_leaves(as_tensors(batch)):
        if (
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and not (leaf.is_nested or leaf.is_meta)
            and leaf.numel()
        ):
            flat = leaf.detach().flatten()
            some = flat[:: -(-len(flat) // FINGERPRINT)].cpu().contiguous()
            found = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), found)
    return found
