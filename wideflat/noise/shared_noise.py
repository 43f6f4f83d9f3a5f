"""Gaussian noise on the parameters of a network: w -> w + sigma a z, z ~ N(0, I), with a = w unless given   (Eq. 4).

Here one z is for all examples of a batch: the parameters are pointed at a buffer that holds w + sigma a z, and the
weights themselves are never written to. Another z for every example: :mod:`wideflat.noise.example_noise`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from wideflat.kernels.float64 import fetched
from wideflat.kernels.noise import GaussianNoise
from wideflat.noise.versions import Versions

__all__ = ["SharedNoise", "fill_normal", "unwritten"]

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
        scales: a by the names of the parameters (:mod:`wideflat.noise.scales`); default the weights themselves.

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
        self._row: tuple[tuple[float, ...], list[Tensor]] | None = None  # see move
        self._versions: Versions | None = None  # inside of ``with``

    def __enter__(self) -> SharedNoise:
        self._versions = Versions(parameter for parameter, _ in self._original)
        self._put()
        return self

    def __exit__(self, *_: object) -> None:
        if self.in_place:
            self.apply(0.0)
        for parameter, data in self._original:
            parameter.data = data
        if self._versions is not None:
            self._versions.restore()
            self._versions = None

    def _put(self) -> None:
        """Let the network see the buffer, also where it has pointed a parameter somewhere else meanwhile."""
        for (parameter, data), (_, noisy, _) in zip(self._original, self._slots, strict=True):
            if self.in_place:
                data.copy_(noisy)
            target = data if self.in_place else noisy
            if parameter.data_ptr() != target.data_ptr():
                parameter.data = target
        if self._versions is not None:
            self._versions.advance()

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

    def point(self, directions: Mapping[str, Tensor]) -> None:
        """Use the given directions, by the names of the parameters, in place of a z."""
        for name, (_, _, noise) in zip(self.names, self._slots, strict=True):
            noise.copy_(directions[name])

    def move(self, point: Sequence[float], ways: Sequence[Sequence[Tensor]]) -> None:
        """Set the parameters to w + sum_k t_k d_k; points that differ in the last t alone share the rest of the sum.

        Args:
            point: The t_k.
            ways: The d_k, each as :meth:`flattened` gives it.
        """
        if not any(point):
            self.apply(0.0)
            return
        if self._row is None or self._row[0] != tuple(point[:-1]):
            total = list(self._weights)
            for t, way in zip(point[:-1], ways, strict=False):
                total = [torch.add(start, part, alpha=t) for start, part in zip(total, way, strict=True)]
            self._row = tuple(point[:-1]), total
        for start, part, noisy in zip(self._row[1], ways[-1], self._noisy, strict=True):
            torch.add(start, part, alpha=point[-1], out=noisy)
        self._put()

    def flattened(self, directions: Mapping[str, Tensor]) -> list[Tensor]:
        """A direction by the names of the parameters as flat tensors, one of each dtype."""
        self.point(directions)
        return [noise.clone() for noise in self._noise]

    def originals(self) -> dict[str, Tensor]:
        """The w of each parameter, by name."""
        return {name: data for name, (_, data) in zip(self.names, self._original, strict=True)}

    def directions(self) -> dict[str, Tensor]:
        """The a z of each parameter (views), by name."""
        return {name: noise for name, (_, _, noise) in zip(self.names, self._slots, strict=True)}

    def direction(self, parameter: nn.Parameter) -> Tensor | None:
        """The a z of one parameter (a view), or None where it is not perturbed."""
        return next((noise for owner, _, noise in self._slots if owner is parameter), None)


@contextlib.contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """At the end the parameters have the memory and the values they had, whatever the network wrote into them."""
    kept = [(parameter, parameter.data, parameter.detach().clone()) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, data, _ in kept:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for (_, data, values), same in zip(kept, _same([pair[1:] for pair in kept]), strict=True):
            if not same:
                data.copy_(values)


def _same(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Of each pair of tensors whether they are equal; the host waits once for those on a device."""
    here = [a.device.type == "cpu" for a, _ in pairs]
    there = iter(fetched([(a == b).all() for (a, b), near in zip(pairs, here, strict=True) if not near]))
    return [torch.equal(a, b) if near else bool(next(there)) for (a, b), near in zip(pairs, here, strict=True)]


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
