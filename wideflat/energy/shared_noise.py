"""Multiplicative Gaussian noise on the parameters of a network: w -> w + sigma z * w, z ~ N(0, I)   (Eq. 4).

Here one z is for all examples of a batch: the parameters are pointed at a buffer that holds w + sigma z * w, and the
weights themselves are never written to. Another z for every example: :mod:`wideflat.energy.example_noise`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from wideflat.kernels.noise import GaussianNoise

__all__ = ["FirstLayer", "Selection", "SharedNoise", "fill_normal", "is_source", "select_parameters"]

#: Which parameters are perturbed: a word, a regular expression for the whole name, several of them, or a predicate.
Selection: TypeAlias = str | Iterable[str] | Callable[[str, nn.Parameter], bool]

#: Numbers up to which torch's own generator is as fast as setting up another.
FEW = 4096

_NORMALISATIONS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_WORDS = ("all", "no batch norm", "no biases", "weights")


def select_parameters(model: nn.Module, selection: Selection = "all") -> tuple[list[str], str]:
    """The names of the parameters to perturb, and the selection in words.

    Args:
        model: The network. Frozen parameters (``requires_grad=False``) count too: Eq. 4 perturbs w, not what was
            trained. Tied parameters appear once. Buffers are never perturbed.
        selection: One of

            * ``"all"``: every parameter, as Eq. 4 says;
            * ``"no batch norm"``: without the affine parameters of normalisation layers;
            * ``"no biases"``: without the parameters called ``bias`` (those of normalisation layers too);
            * ``"weights"``: without both;
            * a regular expression that the whole name must match, or several of them (``"layer1.*"``,
              ``["conv1.weight", "fc.*"]``);
            * a function of the name and the parameter that says whether it is perturbed.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> select_parameters(model, "weights")
        (['0.weight'], 'weights')
        >>> select_parameters(model, "0[.].*")
        (['0.weight', '0.bias'], '0[.].*')
    """
    normalisation = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NORMALISATIONS)
        for name, _ in module.named_parameters(recurse=False)
    }
    parameters = dict(model.named_parameters())
    bias = {name for name in parameters if name.rpartition(".")[2] == "bias"}
    if callable(selection):
        chosen = [name for name, parameter in parameters.items() if selection(name, parameter)]
        words = f"function {getattr(selection, '__qualname__', type(selection).__qualname__)}"
    elif selection in _WORDS:
        words = str(selection)
        without = {"all": set(), "no batch norm": normalisation, "no biases": bias, "weights": normalisation | bias}
        chosen = [name for name in parameters if name not in without[words]]
    else:
        patterns = [selection] if isinstance(selection, str) else list(selection)
        words = " | ".join(patterns)
        try:
            chosen = [name for name in parameters if any(re.fullmatch(pattern, name) for pattern in patterns)]
        except (re.error, TypeError) as error:
            raise ValueError(
                f"parameters must be one of {_WORDS}, a regular expression, several of them, or a function of name and "
                f"parameter; got {selection!r} ({error})"
            ) from None
    if not chosen:
        raise ValueError(
            f"parameters={selection!r} selects none of the {len(parameters)} parameters; "
            f"their names are {', '.join(list(parameters)[:8])}{', ...' if len(parameters) > 8 else ''}"
        )
    return chosen, words


class SharedNoise:
    """w + sigma z * w for chosen parameters, one z for everything that is evaluated until the next :meth:`draw`.

    Inside ``with noise:`` the parameters point at a buffer of their own; :meth:`draw` and :meth:`apply` fill it. At the
    end they point at their own storage again, which was never written to, so the weights are exactly what they were.

    Args:
        module: The network.
        names: Names of the parameters to perturb.

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

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = dict(module.named_parameters())
        groups: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
        for name in names:
            parameter = parameters[name]
            if not parameter.is_floating_point():
                raise ValueError(f"only real floating-point parameters can be perturbed; {name} is {parameter.dtype}")
            groups.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        self._original = [(parameter, parameter.data) for group in groups.values() for parameter in group]
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        self.names = [name_of[id(parameter)] for parameter, _ in self._original]
        self._weights: list[Tensor] = []  # w, z * w and w + sigma z * w, each of them flat, one of each a dtype
        self._noise: list[Tensor] = []
        self._noisy: list[Tensor] = []
        self._slots: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for (device, dtype), group in groups.items():
            total = sum(parameter.numel() for parameter in group)
            weights, noise, noisy = (torch.empty(total, dtype=dtype, device=device) for _ in range(3))
            start = 0
            for parameter in group:
                views = [_like(flat, start, parameter) for flat in (weights, noise, noisy)]
                views[0].copy_(parameter.data)
                self._slots.append((parameter, views[2], views[1]))
                start += parameter.numel()
            noisy.copy_(weights)
            self._weights.append(weights)
            self._noise.append(noise)
            self._noisy.append(noisy)
        self.numel = sum(flat.numel() for flat in self._weights)

    def __enter__(self) -> SharedNoise:
        for parameter, noisy, _ in self._slots:
            parameter.data = noisy
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, data in self._original:
            parameter.data = data

    def draw(self, generator: torch.Generator) -> None:
        """Draw a new z. It takes effect at the next :meth:`apply`."""
        for weights, noise in zip(self._weights, self._noise, strict=True):
            if noise.device.type == "cpu":
                _noise_from(generator).fill(noise, weights)
            else:
                fill_normal(noise, generator).mul_(weights)

    def apply(self, sigma: float) -> None:
        """Set the parameters to w + sigma z * w."""
        for weights, noise, noisy in zip(self._weights, self._noise, self._noisy, strict=True):
            if sigma == 0:  # exactly w, whatever stands in the buffer of z
                noisy.copy_(weights)
            else:
                torch.add(weights, noise, alpha=sigma, out=noisy)

    def point(self, directions: dict[str, Tensor]) -> None:
        """Use the given directions, by the names of the parameters, in place of z * w."""
        for name, (_, _, noise) in zip(self.names, self._slots, strict=True):
            noise.copy_(directions[name])

    def direction(self, parameter: nn.Parameter) -> Tensor | None:
        """The z * w of one parameter (a view), or None where it is not perturbed."""
        return next((noise for owner, _, noise in self._slots if owner is parameter), None)


class FirstLayer(TorchFunctionMode):
    """The layer that sees the input of the network is linear in sigma: two of its products serve every sigma.

    .. code-block:: text

        (w + sigma z * w) x = w x + sigma (z * w) x

    Args:
        noise: The noise on the parameters, shared by the batch and by all sigmas.
    """

    def __init__(self, noise: SharedNoise) -> None:
        super().__init__()
        self._original = {id(parameter): data for parameter, data in noise._original}
        self._direction = {id(parameter): direction for parameter, _, direction in noise._slots}
        self._source: Tensor | None = None
        self._sigma = 0.0
        self._products: dict[int, tuple[Tensor, Tensor]] = {}

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
        if func in _PRODUCTS and len(args) >= 2 and id(args[1]) in self._direction and is_source(args[0], self._source):
            return self._product(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _product(
        self,
        product: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        key = id(weight)
        if key not in self._products:
            w, zw = self._original[key], self._direction[key]
            b = self._original.get(id(bias), bias) if bias is not None else None
            self._products[key] = (
                product(x, w, b, *args, **kwargs),
                product(x, zw, self._direction.get(id(bias)), *args, **kwargs),
            )
        return torch.add(self._products[key][0], self._products[key][1], alpha=self._sigma)


_PRODUCTS = (F.linear, F.conv1d, F.conv2d, F.conv3d)


def is_source(x: Any, source: Tensor | None) -> bool:
    """Whether ``x`` is the input of the network, or a view of all of it."""
    return (
        source is not None
        and isinstance(x, Tensor)
        and x.data_ptr() == source.data_ptr()
        and x.numel() == source.numel()
    )


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
