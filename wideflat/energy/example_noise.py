"""Multiplicative Gaussian noise with another z for every example, without a network for each (Eq. 4).

For one example,

.. code-block:: text

    linear layer, one input vector x     (w + sigma z * w) x ~ N(w x, sigma^2 (w * w) (x * x)), independent over rows:
                                         two products and one Gaussian an output (local reparametrisation)
    convolution, or a layer used         w x + sigma r * ( (z * w) (s * x) )  with signs r (outputs), s (inputs) of
    at several positions                 the example and z of the batch: r s^T * z is again N(0, I) (Flipout)
    affine part of a normalisation       z of its own for every example and channel

Noise at every position of its own would be wrong for a convolution: its positions share the weights. Any other use of a
parameter (an embedding, a tied weight, a custom operation) gets a z shared by the batch
(:class:`wideflat.energy.shared_noise.SharedNoise`), which is also unbiased.

Flipout is marginally exact for every example, but the examples of a batch share z up to signs: they are uncorrelated to
first order, not independent. So error bars are taken over batches (:mod:`~wideflat.energy.measure`),
never over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from wideflat.energy.shared_noise import fill_normal, is_source

__all__ = ["ExampleNoise"]


class ExampleNoise(TorchFunctionMode):
    """Evaluate a network with another z for every example: inside ``with noise:`` its operations are noisy.

    Which operation gets which treatment is found by running the network once (:meth:`probe`).

    Args:
        module: The network.
        names: Names of the parameters to perturb.

    Attributes:
        independent: Whether all noise is independent between examples (no Flipout, nothing shared by the batch).
        treatment: For each perturbed parameter: ``"independent"``, ``"flipout"`` or ``"shared"``.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        wanted = set(names)
        self._chosen = {id(p): p for name, p in module.named_parameters() if name in wanted}
        self._module = module
        self.treatment: dict[str, str] = {}
        self._plan: dict[int, str] = {}
        self._sigma = 0.0
        self._generator = torch.Generator()
        self._drawn: dict[tuple[int, str], Tensor] = {}
        self._source: Tensor | None = None
        self._memo: dict[tuple[int, str], Tensor] = {}
        self._batch, self._tiles = 0, 1
        self._handlers: dict[Callable[..., Any], Callable[..., Tensor]] = {
            F.linear: self._linear,
            F.conv1d: self._convolution(F.conv1d),
            F.conv2d: self._convolution(F.conv2d),
            F.conv3d: self._convolution(F.conv3d),
            F.batch_norm: self._batch_norm,
            F.layer_norm: self._layer_norm,
            F.group_norm: self._group_norm,
        }

    # ------------------------------------------------------------------------------------------ what is used how

    def probe(self, run: Callable[[Any], Any], batches: Sequence[tuple[Any, int]]) -> None:
        """Find out how each parameter is used.

        Args:
            run: Evaluates the network on a batch.
            batches: Batches of different sizes, each with its number of examples: an operation is treated example by
                example only if the first axis of its input is as long as the batch is, for all of them.
        """
        uses: dict[int, list[str]] = {key: [] for key in self._chosen}
        calls: dict[int, int] = {}
        for batch, size in batches:
            recorder = _Recorder(self._chosen, size)
            with recorder:
                run(batch)
            for key, found in recorder.uses.items():
                uses[key] += found
                calls[key] = max(calls.get(key, 0), len(found))
        for key in self._chosen:
            kinds = set(uses[key])
            if not kinds or "other" in kinds:
                plan = "shared"
            elif kinds == {"vector"} and calls[key] == 1:
                plan = "independent"
            elif kinds <= {"vector", "positions"}:
                plan = "flipout"
            elif kinds == {"affine"}:
                plan = "independent"
            else:
                plan = "shared"
            self._plan[key] = plan
        self.treatment = {self._names[key]: plan for key, plan in self._plan.items()}

    @property
    def independent(self) -> bool:
        """Whether all noise is independent between examples."""
        return set(self._plan.values()) == {"independent"}

    def shared_names(self) -> list[str]:
        """The parameters whose z the batch shares, for a ``SharedNoise`` beside this."""
        return [name for name, plan in self.treatment.items() if plan == "shared"]

    # ------------------------------------------------------------------------------------------ one evaluation

    def start(
        self, source: Any, size: int, generator: torch.Generator, memo: dict | None = None, tiles: int = 1
    ) -> None:
        """Begin with another batch.

        Args:
            source: The input of the network. What a first layer computes from it serves every sigma.
            size: Number of examples.
            generator: Where the noise comes from.
            memo: Keeps those products that do not depend on z, for the next time that this batch comes.
            tiles: How often the batch consists of the same examples; such products are computed for the first of them.
        """
        self._source = source if isinstance(source, Tensor) else None
        self._batch, self._tiles = size, tiles
        self._generator = generator
        self._memo = {} if memo is None else memo
        self._drawn = {}

    def apply(self, sigma: float, fresh: bool = False) -> None:
        """Set sigma; ``fresh`` draws new noise, else the noise of this batch is used for every sigma."""
        self._sigma = sigma
        if fresh:
            self._drawn = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the operations that use a perturbed parameter."""
        kwargs = kwargs or {}
        if self._sigma == 0:
            return func(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is not None and any(self._own(argument) for argument in (*args, *kwargs.values())):
            return handler(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            for argument in args:
                if self._own(argument):
                    raise RuntimeError(
                        f'noise="example": parameter {self._names[id(argument)]} is now used by '
                        f"{getattr(func, '__name__', func)}, which it was not for the first batch; "
                        'use noise="batch" for a network that changes what it computes'
                    )
        return result

    def _own(self, argument: object) -> bool:
        """Whether ``argument`` is a parameter that is perturbed here (and not by noise shared by the batch)."""
        return self._plan.get(id(argument), "shared") != "shared"

    def _normals(self, parameter: Tensor, kind: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """N(0, 1) of the given shape, the same ones whenever this parameter asks again for this batch."""
        key = (id(parameter), kind)
        if key not in self._drawn:
            self._drawn[key] = fill_normal(torch.empty(shape, dtype=like.dtype, device=like.device), self._generator)
        return self._drawn[key]

    def _signs(self, parameter: Tensor, kind: str, shape: Sequence[int], like: Tensor) -> Tensor:
        key = (id(parameter), kind)
        if key not in self._drawn:
            device = self._generator.device
            bits = torch.randint(0, 2, tuple(shape), generator=self._generator, device=device, dtype=torch.int8)
            self._drawn[key] = (2 * bits - 1).to(like.device, like.dtype)
        return self._drawn[key]

    def _keep(self, store: dict, key: tuple[int, str], x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """``compute(x)``; where ``x`` is the input of the network, once a batch and for the first of its tiles only."""
        if not is_source(x, self._source):
            return compute(x)
        if key not in store:
            store[key] = compute(x[: len(x) // self._tiles])
        return store[key]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sigma = self._sigma
        out = self._mean(x, weight, bias, F.linear)
        plan = self._plan.get(id(weight))
        if plan == "flipout":
            out = torch.add(out, self._flipout(F.linear, x, weight, x.dim() - 1, x.dim() - 1), alpha=sigma)
        elif plan == "independent":
            key = (id(weight), "std")
            std = self._keep(self._memo, key, x, lambda y: F.linear(y * y, weight * weight).sqrt_())
            xi = self._normals(weight, "xi", (len(x) // len(out), *out.shape), out)
            out = torch.addcmul(out, std, xi, value=sigma).flatten(0, 1)
        elif len(out) < len(x):
            out = out.repeat(self._tiles, 1)
        return self._add_bias_noise(out, bias, -1)

    def _mean(self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
        """The product without noise, kept for a first layer unless noise shared by the batch moves its parameters."""
        if any(self._plan.get(id(parameter)) == "shared" for parameter in (weight, bias)):
            return product(x, weight, bias)
        return self._keep(self._memo, (id(weight), "mean"), x, lambda y: product(y, weight, bias))

    def _convolution(self, convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noisy(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            out = self._mean(x, weight, bias, lambda y, w, b: convolution(y, w, b, *args, **kwargs))
            if self._own(weight):
                change = self._flipout(lambda y, w: convolution(y, w, None, *args, **kwargs), x, weight, 1, 1)
                out = torch.add(out, change, alpha=self._sigma)
            return self._add_bias_noise(out, bias, 1)

        return noisy

    def _flipout(
        self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, axis: int, out_axis: int
    ) -> Tensor:
        """The change r * product(s * x, z * w) for signs r, s of each example and the batch's z."""

        def compute(x: Tensor) -> Tensor:
            z = self._normals(weight, "z", weight.shape, weight)
            s = self._signs(weight, "s", (self._batch, x.shape[axis]), x)
            r = self._signs(weight, "r", (self._batch, weight.shape[0]), x)
            change = product(x * _along(s, x.dim(), axis), z * weight)
            return change.mul_(_along(r, change.dim(), out_axis))

        return self._keep(self._drawn, (id(weight), "change"), x, compute)

    def _add_bias_noise(self, out: Tensor, bias: Tensor | None, axis: int) -> Tensor:
        if bias is None or not self._own(bias):
            return out
        z = self._normals(bias, "z", (self._batch, bias.numel()), out)
        return out + self._sigma * _along(z * bias, out.dim(), axis % out.dim())

    def _affine(self, normal: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """(1 + sigma z) weight * normal + (1 + sigma z') bias, z and z' of every example; ``shape`` is that of one."""
        for parameter, operation in ((weight, torch.mul), (bias, torch.add)):
            if parameter is None:
                continue
            value = parameter.reshape(1, *shape)
            if self._own(parameter):
                z = self._normals(parameter, "z", (self._batch, parameter.numel()), normal)
                value = value * (1 + self._sigma * z.reshape(self._batch, *shape))
            normal = operation(normal, value)
        return normal

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.batch_norm(x, running_mean, running_var, None, None, training, momentum, eps)
        return self._affine(normal, weight, bias, (x.shape[1], *(1,) * (x.dim() - 2)))

    def _layer_norm(
        self,
        x: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.layer_norm(x, normalized_shape, None, None, eps)
        return self._affine(normal, weight, bias, (*(1,) * (x.dim() - 1 - len(normalized_shape)), *normalized_shape))

    def _group_norm(
        self, x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        normal = F.group_norm(x, num_groups, None, None, eps)
        return self._affine(normal, weight, bias, (x.shape[1], *(1,) * (x.dim() - 2)))


def _along(values: Tensor, dims: int, axis: int) -> Tensor:
    """(batch, features) as a tensor of ``dims`` axes with the features along ``axis``."""
    return values.reshape(values.shape[0], *(values.shape[1] if i == axis else 1 for i in range(1, dims)))


class _Recorder(TorchFunctionMode):
    """Notes for each parameter what it is used for: one input vector, several positions, an affine map, other."""

    def __init__(self, chosen: dict[int, nn.Parameter], size: int) -> None:
        super().__init__()
        self.uses: dict[int, list[str]] = {key: [] for key in chosen}
        self._size = size

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.uses:
                    self.uses[id(leaf)].append(self._kind(func, args, kwargs, leaf))
        return result

    def _kind(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaf: Tensor) -> str:
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x is leaf or x.dim() < 2 or x.shape[0] != self._size:
            return "other"
        if func is F.linear:
            return "vector" if x.dim() == 2 else "positions"
        if func in (F.conv1d, F.conv2d, F.conv3d):
            dims = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}[func]
            return "positions" if x.dim() == dims else "other"
        if func is F.batch_norm:
            training = args[5] if len(args) > 5 else kwargs.get("training", False)
            return "other" if training else "affine"
        if func is F.layer_norm:
            shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
            return "affine" if x.dim() > len(shape) else "other"
        return "affine" if func is F.group_norm else "other"
