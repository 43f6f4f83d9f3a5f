"""What the steps of Entropy-SGD and its family are made of, by torch's operations: for every device, type and layout.

The center w and the mean mu may be of a wider type than the explorer w', and on another device. The model then holds w
rounded to its own type. So that this rounding is no displacement, w' is always compared with w *as the model holds it*.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wideflat.kernels.counter import key_of, normal
from wideflat.kernels.flat_blocks import flat, is_dense
from wideflat.kernels.noise import GaussianNoise
from wideflat.kernels.shards import Patch, Place

#: Elements of small tensors that get their noise at once: on the CPU, and where launches are to be few.
RUN, LONG_RUN = 32768, 1 << 24

__all__ = ["add_noise", "as_held", "displacement", "pull_back", "put_back", "running_mean", "take_up"]


def as_held(w: list[Tensor], w_prime: list[Tensor]) -> list[Tensor]:
    """The center w as the model holds it: in the type and on the device of w'; w itself where they are the same."""
    return [center.to(p.device, p.dtype) for center, p in zip(w, w_prime, strict=True)]


def displacement(w_prime: list[Tensor], w: list[Tensor]) -> list[Tensor]:
    """Compute w' - w, in the type of w'."""
    return list(torch._foreach_sub(w_prime, as_held(w, w_prime)))


def pull_back(w_prime: list[Tensor], w: list[Tensor], fraction: float) -> None:
    """Compute w' <- w' - fraction (w' - w)."""
    torch._foreach_lerp_(w_prime, as_held(w, w_prime), fraction)


def put_back(w_prime: list[Tensor], w: list[Tensor]) -> None:
    """Compute w' <- w."""
    torch._foreach_copy_(w_prime, w)


def take_up(w: list[Tensor], w_prime: list[Tensor]) -> None:
    """Put w on w' where the model does not hold w, because somebody has changed its weights.

    >>> w, w_prime = torch.tensor([1.001, 1.001]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    >>> take_up([w], [w_prime])  # the first is w in bfloat16, the second is not
    >>> [round(x, 3) for x in w.tolist()]
    [1.001, 3.0]
    """
    same = [center.dtype == p.dtype for center, p in zip(w, w_prime, strict=True)]
    if all(same):
        torch._foreach_copy_(w, w_prime)
        return
    for center, p in zip(w, w_prime, strict=True):
        now = p.to(center.device)
        center.copy_(torch.where(center.to(p.dtype) == now, center, now.to(center.dtype)))


def running_mean(mu: list[Tensor], w_prime: list[Tensor], alpha: float) -> None:
    """Compute mu <- alpha mu + (1 - alpha) w'."""
    explorer = [p.to(mean.device, mean.dtype) for mean, p in zip(mu, w_prime, strict=True)]
    torch._foreach_lerp_(mu, explorer, 1 - alpha)


def add_noise(w_prime: list[Tensor], places: list[Place], noise: GaussianNoise, step: int, scale: float) -> None:
    """Add ``scale`` times N(0, I), a function of (seed, step, place), places counting in the order of memory, or of the
    indices where there are gaps. On an accelerator it is another one than on the CPU (`wideflat.kernels.counter`).
    """
    whole: list[tuple[Tensor, int]] = []
    alone: list[Tensor] = []
    places_alone: list[int] = []
    for p, place in zip(w_prime, places, strict=True):
        if isinstance(place, Patch):
            _add_to_patch(p, place, noise, step, scale)
        else:
            whole.append((p, place))
    for run, place in _runs(whole):
        views = [flat(p) if is_dense(p) else p for p in run]
        if len(run) == 1 and run[0].device.type == "cpu":
            alone += views
            places_alone.append(place)
            continue
        count = sum(p.numel() for p in run)
        pieces = _drawn(noise, step, place, count, run[0]).split([p.numel() for p in run])
        shaped = [piece.view(view.shape) for piece, view in zip(pieces, views, strict=True)]
        torch._foreach_add_(views, shaped, alpha=scale)
    noise.add_(alone, step, places_alone, scale)  # together, since the calls for the tails are dear


def _drawn(noise: GaussianNoise, step: int, place: int, count: int, like: Tensor) -> Tensor:
    """So many numbers from a place on, for a tensor."""
    if like.device.type == "cpu":
        return noise(step, place, count)
    return normal(torch.arange(place, place + count, device=like.device), key_of(noise.seed, step)).to(like.dtype)


def _add_to_patch(p: Tensor, patch: Patch, noise: GaussianNoise, step: int, scale: float) -> None:
    """Noise for a part of a tensor that is no single stretch of it."""
    turned = p.permute(patch.order) if p.dim() == len(patch.order) else p  # or a stretch of its memory
    numbers = turned.contiguous()
    most = RUN if p.device.type == "cpu" else LONG_RUN
    for z, at in patch.gather(lambda place, count: _drawn(noise, step, place, count, p), most):
        numbers.view(-1)[at : at + z.numel()].add_(z, alpha=scale)
    if numbers is not turned:
        turned.copy_(numbers)


def _runs(tensors: list[tuple[Tensor, int]]) -> list[tuple[list[Tensor], int]]:
    """Tensors whose places follow each other, together, up to a number of elements; every other tensor alone."""
    runs: list[tuple[list[Tensor], int]] = []
    end, room = -1, 0
    for tensor, place in tensors:
        if place == end and tensor.numel() <= room:
            runs[-1][0].append(tensor)
            room -= tensor.numel()
        else:
            runs.append(([tensor], place))
            room = (RUN if tensor.device.type == "cpu" else LONG_RUN) - tensor.numel()
        end = place + tensor.numel()
    return runs
