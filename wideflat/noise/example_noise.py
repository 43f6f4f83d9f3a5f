"""Gaussian noise w + sigma a z with another z for every example, without a network for each (Eq. 4: a = w).

For one example,

.. code-block:: text

    linear layer, one input vector x     (w + sigma a z) x ~ N(w x, sigma^2 (a * a) (x * x)), independent over rows:
                                         two products and one Gaussian an output (local reparametrisation)
    convolution, or a layer used         w x + sigma r * ( (a z) (s * x) )  with signs r (outputs), s (inputs) of
    at several positions                 the example and z of the batch: r s^T * z is again N(0, I) (Flipout)
    affine part of a normalisation       z of its own for every example and channel

Noise at every position of its own would be wrong for a convolution: its positions share the weights. Any other use of a
parameter (an embedding, a tied weight, a custom operation) gets a z shared by the batch
(:class:`wideflat.noise.shared_noise.SharedNoise`), which is also unbiased.

Flipout is marginally exact for every example, but the examples of a batch share z up to signs: they are uncorrelated to
first order, not independent. So error bars are taken over batches (:mod:`~wideflat.energy.measure`),
never over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wideflat.noise.first_layer import view_of
from wideflat.noise.shared_noise import fill_normal
from wideflat.noise.uses import CONVOLUTIONS, Unforeseen, Use, is_description, tensors_in, treatments, use_of, uses

__all__ = ["ExampleNoise"]


class ExampleNoise(TorchFunctionMode):
    """Evaluate a network with another z for every example: inside ``with noise:`` its operations are noisy.

    Which operation gets which treatment is found by running the network (:meth:`probe`). What the network does later is
    held against it: :class:`~wideflat.noise.uses.Unforeseen` is raised where a parameter is used in another way.

    Args:
        module: The network.
        names: Names of the parameters to perturb.
        scales: a by the names of the parameters (:mod:`wideflat.noise.scales`); default the weights themselves.

    Attributes:
        independent: Whether all noise is independent between examples (no Flipout, nothing shared by the batch).
        treatment: For each perturbed parameter: ``"independent"``, ``"flipout"`` or ``"shared"``.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], scales: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._scales = scales
        wanted = set(names)
        self._chosen = {id(p): p for name, p in module.named_parameters() if name in wanted}
        self.treatment: dict[str, str] = {}
        self._seen: dict[int, list[list[Use]]] = {}
        self._plan: dict[int, str] = {}
        self._sigma = 0.0
        self._generator = torch.Generator()
        self._drawn: dict[tuple[Any, ...], Tensor] = {}
        self._source: Tensor | None = None
        self._memo: dict[tuple[Any, ...], Tensor] = {}
        self._batch, self._tiles = 0, 1
        self.recording = False  # whether the inputs of linear layers are held, for directions()
        self._vectors: dict[int, Tensor | None] = {}  # what each linear layer of independent noise saw, by its weight
        self._handlers: dict[Callable[..., Any], Callable[..., Tensor]] = {
            F.linear: self._linear,
            **{convolution: self._convolution(convolution) for convolution in CONVOLUTIONS},
            F.batch_norm: self._batch_norm,
            F.layer_norm: self._layer_norm,
            F.group_norm: self._group_norm,
        }

    # ------------------------------------------------------------------------------------------ what is used how

    def probe(self, run: Callable[[Any], Any], batches: Sequence[tuple[Any, int]]) -> None:
        """Find out how each parameter is used; see :func:`wideflat.noise.uses.uses`.

        Another call adds its batches to those that were seen: noise that is not independent does not become it.
        """
        for key, seen in uses(run, batches, list(self._chosen.values())).items():
            self._seen.setdefault(key, []).extend(seen)
        self._plan = treatments(self._seen)
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
        self._vectors = {}
        if fresh:
            self._drawn = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the operations that use a perturbed parameter."""
        kwargs = kwargs or {}
        own = [leaf for leaf in tensors_in(args, kwargs) if self._own(leaf)] if self._sigma else []
        if not own:
            return func(*args, **kwargs)
        handler = self._handlers.get(func)
        if handler is not None and all(self._as_planned(func, args, kwargs, parameter) for parameter in own):
            return handler(*args, **kwargs)
        result = func(*args, **kwargs)
        if not is_description(func, result):
            raise Unforeseen(
                f'noise="example": parameter {self._names[id(own[0])]} is now used by '
                f"{getattr(func, '__name__', func)} in a way in which it was not for the first batch; "
                'use noise="batch" for a network that changes what it computes'
            )
        return result

    def _own(self, argument: object) -> bool:
        """Whether ``argument`` is a parameter that is perturbed here (and not by noise shared by the batch)."""
        return self._plan.get(id(argument), "shared") != "shared"

    def _as_planned(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parameter: Tensor
    ) -> bool:
        kind = use_of(func, args, kwargs, parameter, self._batch).kind
        if self._plan[id(parameter)] == "flipout":
            return kind in ("vector", "positions")
        return kind == "affine" or (kind == "vector" and id(parameter) not in self._vectors)

    def _a(self, parameter: Tensor) -> Tensor:
        """What the noise on a parameter is proportional to."""
        return parameter if self._scales is None else self._scales[self._names[id(parameter)]]

    def directions(self, example: int) -> dict[str, Tensor]:
        """An a z of every parameter that gives one example alone what it had in the last evaluation.

        Flipout and affine parts have such a z. For a linear layer any z will do with (a z) x = std xi; this is the
        shortest, z_oi = xi_o a_oi x_i / std_o. Parameters with noise shared by the batch are left out. The evaluation
        must have been made with ``recording`` set.
        """
        found = {}
        for key, parameter in self._chosen.items():
            drawn = {kind: values for (owner, kind, *_), values in self._drawn.items() if owner == key}
            seen, a = self._vectors.get(key), self._a(parameter)
            if seen is not None:
                x, xi = seen[example], drawn["xi"].flatten(0, 1)[example]
                direction = a * a
                variance = direction @ (x * x)
                factor = torch.where(variance > 0, xi * variance.rsqrt(), 0.0)
                found[self._names[key]] = direction.mul_(factor[:, None]).mul_(x)
            elif "s" in drawn:
                fan_in = parameter.shape[1]
                group = torch.arange(len(parameter)) // (len(parameter) * fan_in // drawn["s"].shape[1])
                columns = group[:, None] * fan_in + torch.arange(fan_in)
                signs = drawn["r"][example][:, None] * drawn["s"][example][columns.to(drawn["s"].device)]
                signs = signs.reshape(*signs.shape, *(1,) * (parameter.dim() - 2))
                found[self._names[key]] = signs * drawn["z"] * a
            elif "z" in drawn:
                found[self._names[key]] = drawn["z"][example].reshape(parameter.shape) * a
            elif self._own(parameter):  # not used by this batch
                found[self._names[key]] = torch.zeros_like(parameter)
        return found

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

    def _keep(
        self, store: dict[tuple[Any, ...], Tensor], key: tuple[Any, ...], x: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``compute(x)``; where ``x`` is the input of the network, once a batch and for the first of its tiles only.

        ``key`` holds all that the product depends on besides how it sees the input.
        """
        view = view_of(x, self._source)
        if view is None:
            return compute(x)
        if (*key, view) not in store:
            store[(*key, view)] = compute(x[: len(x) // self._tiles])
        return store[(*key, view)]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sigma = self._sigma
        out = self._mean(x, weight, bias, F.linear)
        plan = self._plan.get(id(weight))
        if plan == "flipout":
            out = torch.add(out, self._flipout(F.linear, x, weight, x.dim() - 1, x.dim() - 1), alpha=sigma)
        elif plan == "independent":
            self._vectors[id(weight)] = x if self.recording else None
            key = (id(weight), "std")
            a = self._a(weight)
            std = self._keep(self._memo, key, x, lambda y: F.linear(y * y, a * a).sqrt_())
            xi = self._normals(weight, "xi", (len(x) // len(out), *out.shape), out)
            out = torch.addcmul(out, std, xi, value=sigma).flatten(0, 1)
        elif len(out) < len(x):
            out = out.repeat(self._tiles, 1)
        return self._add_bias_noise(out, bias, -1)

    def _mean(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor], *more: Any
    ) -> Tensor:
        """The product without noise, kept for a first layer whose tensors are parameters that nothing else moves."""
        for tensor in (weight, bias):
            if tensor is not None and (id(tensor) not in self._names or self._plan.get(id(tensor)) == "shared"):
                return product(x, weight, bias)
        return self._keep(self._memo, (id(weight), "mean", id(bias), *more), x, lambda y: product(y, weight, bias))

    def _convolution(self, convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noisy(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            more = (convolution, repr((args, kwargs)))
            out = self._mean(x, weight, bias, lambda y, w, b: convolution(y, w, b, *args, **kwargs), *more)
            if self._own(weight):
                change = self._flipout(lambda y, w: convolution(y, w, None, *args, **kwargs), x, weight, 1, 1, *more)
                out = torch.add(out, change, alpha=self._sigma)
            return self._add_bias_noise(out, bias, 1)

        return noisy

    def _flipout(
        self,
        product: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        weight: Tensor,
        axis: int,
        out_axis: int,
        *more: Any,
    ) -> Tensor:
        """The change r * product(s * x, a z) for signs r, s of each example and the batch's z."""

        def compute(x: Tensor) -> Tensor:
            z = self._normals(weight, "z", weight.shape, weight)
            s = self._signs(weight, "s", (self._batch, x.shape[axis]), x)
            r = self._signs(weight, "r", (self._batch, weight.shape[0]), x)
            change = product(x * _along(s, x.dim(), axis), z * self._a(weight))
            return change.mul_(_along(r, change.dim(), out_axis))

        return self._keep(self._drawn, (id(weight), "change", *more), x, compute)

    def _add_bias_noise(self, out: Tensor, bias: Tensor | None, axis: int) -> Tensor:
        if bias is None or not self._own(bias):
            return out
        z = self._normals(bias, "z", (self._batch, bias.numel()), out)
        return out + self._sigma * _along(z * self._a(bias), out.dim(), axis % out.dim())

    def _affine(self, normal: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """(w + sigma a z) * normal + b + sigma a' z', z and z' of every example; ``shape`` is that of one."""
        for parameter, operation in ((weight, torch.mul), (bias, torch.add)):
            if parameter is None:
                continue
            value = parameter.reshape(1, *shape)
            if self._own(parameter):
                z = self._normals(parameter, "z", (self._batch, parameter.numel()), normal)
                z = self._sigma * z.reshape(self._batch, *shape)
                value = value * (1 + z) if self._scales is None else value + z * self._a(parameter).reshape(1, *shape)
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
