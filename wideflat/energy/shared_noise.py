"""Gaussian noise on the parameters of a network: w -> w + sigma a z, z ~ N(0, I), with a = w unless given   (Eq. 4).

Here one z is for all examples of a batch: the parameters are pointed at a buffer that holds w + sigma a z, and the
weights themselves are never written to. Another z for every example: :mod:`wideflat.energy.example_noise`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wideflat.energy.uses import is_differentiated
from wideflat.kernels.noise import GaussianNoise

__all__ = ["FirstLayer", "SharedNoise", "fill_normal", "unwritten", "view_of"]

#: Numbers up to which torch's own generator is as fast as setting up another.
FEW = 4096


class SharedNoise:
    """w + sigma a z for chosen parameters, one z for everything that is evaluated until the next :meth:`draw`.

    Inside ``with noise:`` the parameters point at a buffer of their own; :meth:`draw` and :meth:`apply` fill it. At the
    end they point at their own storage again, which was never written to, so the weights are exactly what they were.

    A network that keeps views of its weights outside of its parameters does not see that buffer. For it (and as the
    plain path that the fast one is compared with) ``in_place`` writes w + sigma a z into the weights themselves, and
    their values back at the end.

    Args:
        module: The network.
        names: Names of the parameters to perturb.
        in_place: Write into the weights instead of pointing the parameters at a buffer.
        scales: a by the names of the parameters (:mod:`wideflat.energy.scales`); default the weights themselves.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(2.0)
        >>> noise = SharedNoise(model, ["weight"])
        >>> with noise:
        ...     noise.draw(torch.Generator().manual_seed(0))
        ...     noise.apply(0.5)
        ...     zw = noise.direction(model.weight).item()
        ...     abs(model.weight.item() - (2 + 0.5 * zw)) < 1e-6
        True
        >>> model.weight.item()
        2.0
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        in_place: bool = False,
        scales: Mapping[str, Tensor] | None = None,
    ) -> None:
        parameters = dict(module.named_parameters())
        self.in_place = in_place
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for name in names:
            parameter = parameters[name]
            if not parameter.is_floating_point():
                raise ValueError(
                    f"only real floating-point parameters can be perturbed; {name} is {parameter.dtype}: leave it "
                    "out by parameters=, or hold a complex one as two real ones (torch.view_as_real)"
                )
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._original = [(parameter, parameter.data) for group in groups.values() for parameter in group]
        self._name_of = {id(parameter): name for name, parameter in parameters.items()}
        self.names = [self._name_of[id(parameter)] for parameter, _ in self._original]
        self._weights: list[Tensor] = []  # w, a, a z and w + sigma a z, each of them flat, one of each a dtype
        self._scales: list[Tensor] = []
        self._noise: list[Tensor] = []
        self._noisy: list[Tensor] = []
        self._slots: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for (device, dtype), group in groups.items():
            total = sum(parameter.numel() for parameter in group)
            weights, noise, noisy = (torch.empty(total, dtype=dtype, device=device) for _ in range(3))
            scale = weights if scales is None else torch.empty_like(weights)
            start = 0
            for parameter in group:
                views = [_like(flat, start, parameter) for flat in (weights, noise, noisy)]
                views[0].copy_(parameter.data)
                if scales is not None:
                    _like(scale, start, parameter).copy_(scales[self._name_of[id(parameter)]])
                self._slots.append((parameter, views[2], views[1]))
                start += parameter.numel()
            noisy.copy_(weights)
            self._weights.append(weights)
            self._scales.append(scale)
            self._noise.append(noise)
            self._noisy.append(noisy)
        self.numel = sum(flat.numel() for flat in self._weights)

    def __enter__(self) -> SharedNoise:
        self._put()
        return self

    def __exit__(self, *_: object) -> None:
        if self.in_place:
            self.apply(0.0)
        for parameter, data in self._original:
            parameter.data = data

    def _put(self) -> None:
        """Let the network see the buffer, also where it has pointed a parameter somewhere else meanwhile."""
        for (parameter, data), (_, noisy, _) in zip(self._original, self._slots, strict=True):
            if self.in_place:
                data.copy_(noisy)
            target = data if self.in_place else noisy
            if parameter.data_ptr() != target.data_ptr():
                parameter.data = target

    def draw(self, generator: torch.Generator) -> None:
        """Draw a new z. It takes effect at the next :meth:`apply`."""
        for scale, noise in zip(self._scales, self._noise, strict=True):
            if noise.device.type == "cpu":
                _noise_from(generator).fill(noise, scale)
            else:
                fill_normal(noise, generator).mul_(scale)

    def apply(self, sigma: float) -> None:
        """Set the parameters to w + sigma a z."""
        for weights, noise, noisy in zip(self._weights, self._noise, self._noisy, strict=True):
            if sigma == 0:  # exactly w, whatever stands in the buffer of z
                noisy.copy_(weights)
            else:
                torch.add(weights, noise, alpha=sigma, out=noisy)
        self._put()

    def point(self, directions: dict[str, Tensor]) -> None:
        """Use the given directions, by the names of the parameters, in place of a z."""
        for name, (_, _, noise) in zip(self.names, self._slots, strict=True):
            noise.copy_(directions[name])

    def directions(self) -> dict[str, Tensor]:
        """The a z of each parameter (views), by name."""
        return {name: noise for name, (_, _, noise) in zip(self.names, self._slots, strict=True)}

    def is_parameter(self, tensor: object) -> bool:
        """Whether ``tensor`` is a parameter of the network, perturbed or not, and not something computed from one."""
        return id(tensor) in self._name_of

    def direction(self, parameter: nn.Parameter) -> Tensor | None:
        """The a z of one parameter (a view), or None where it is not perturbed."""
        return next((noise for owner, _, noise in self._slots if owner is parameter), None)


class FirstLayer(TorchFunctionMode):
    """The layer that sees the input of the network is linear in sigma: two of its products serve every sigma.

    .. code-block:: text

        (w + sigma z * w) x = w x + sigma (z * w) x

    A product is kept only for weights and biases that are parameters of the network, under all that it depends on: the
    operation, its tensors, how it sees the input (:func:`view_of`) and its other arguments.

    Args:
        noise: The noise on the parameters, shared by the batch and by all sigmas.
    """

    def __init__(self, noise: SharedNoise) -> None:
        super().__init__()
        self._noise = noise
        self._original = {id(parameter): data for parameter, data in noise._original}
        self._direction = {id(parameter): direction for parameter, _, direction in noise._slots}
        self._source: Tensor | None = None
        self._sigma = 0.0
        self._products: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def start(self, source: Any) -> None:
        """Begin with another batch or another z."""
        self._source = source if isinstance(source, Tensor) else None
        self._products = {}

    def apply(self, sigma: float) -> None:
        """Set sigma."""
        self._sigma = sigma

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the product of the first layer."""
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) >= 2 and id(args[1]) in self._direction:
            view = view_of(args[0], self._source)
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if view is not None and (bias is None or self._noise.is_parameter(bias)):
                return self._product(view, func, *args, **kwargs)
        return func(*args, **kwargs)

    def _product(
        self,
        view: tuple[Any, ...],
        product: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        key = (product, id(weight), id(bias), view, repr((args, kwargs)))
        if key not in self._products:
            w, zw = self._original[id(weight)], self._direction[id(weight)]
            b = self._original.get(id(bias), bias) if bias is not None else None
            self._products[key] = (
                product(x, w, b, *args, **kwargs),
                product(x, zw, self._direction.get(id(bias)), *args, **kwargs),
            )
        return torch.add(self._products[key][0], self._products[key][1], alpha=self._sigma)


_PRODUCTS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


def view_of(x: Any, source: Tensor | None) -> tuple[Any, ...] | None:
    """How ``x`` sees the input of the network: what its values depend on; None where it is not a view of all of it.

    Example:
        >>> x = torch.zeros(3, 3)
        >>> view_of(x, x) == view_of(x[:], x), view_of(x, x) == view_of(x.T, x), view_of(x + 0, x)
        (True, False, None)
    """
    if source is None or type(x) is not Tensor or x.layout is not torch.strided or is_differentiated(x):
        return None
    try:
        if x.data_ptr() != source.data_ptr() or x.numel() != source.numel():
            return None
    except RuntimeError:  # a tensor without memory, as inside of torch.vmap
        return None
    version = 0 if x.is_inference() else x._version
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg(), version


@contextlib.contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """At the end the parameters have the memory and the values they had, whatever the network wrote into them."""
    kept = [(parameter, parameter.data, parameter.detach().clone()) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, data, values in kept:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if not torch.equal(data, values):
                data.copy_(values)


def _like(flat: Tensor, start: int, parameter: Tensor) -> Tensor:
    """A view of ``flat`` from ``start`` with the shape of ``parameter`` and, where it is dense, its order in memory."""
    size, stride = parameter.size(), parameter.stride()
    dense = sorted((s, n) for s, n in zip(stride, size, strict=True) if n != 1)
    expected = 1
    for step, length in dense:
        if step != expected:
            return flat[start : start + parameter.numel()].view(size)
        expected *= length
    return flat.as_strided(size, stride, start)


def _noise_from(generator: torch.Generator) -> GaussianNoise:
    """Normal numbers that are several times cheaper than torch's own, seeded by a generator."""
    return GaussianNoise(int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device)))


def fill_normal(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fill ``out`` with N(0, 1), from a generator of its own device or, where that device has none, of the CPU."""
    if out.device.type == "cpu" and out.numel() > FEW and out.is_contiguous():
        return _noise_from(generator).fill(out)
    if out.device.type == generator.device.type:
        return out.normal_(generator=generator)
    return out.copy_(torch.empty(out.shape, dtype=out.dtype).normal_(generator=generator))
