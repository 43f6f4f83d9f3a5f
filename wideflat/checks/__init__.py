"""What the public doors ask of their arguments, in one voice: what was expected, what came.

Each check returns the value it was given, as the plain type that is meant, so that a door reads
``self.period = whole("period", period, least=1)``.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

__all__ = [
    "a_kind",
    "choice",
    "elements",
    "flag",
    "function",
    "instance",
    "maker",
    "network",
    "number",
    "numbers_of",
    "optimizer",
    "perhaps",
    "real_tensor",
    "shareable",
    "shown",
    "up_to",
    "warn_of_low_lr",
    "warn_user",
    "whole",
]

T = TypeVar("T")

#: An outer rate of Entropy-SGD below this, with the inner one left out, is taken for a learning rate of SGD.
LOW_LR = 0.1
#: Larger counts are never meant: nothing here has as many epochs, replicas or classes.
MOST = 10**9
#: Larger rates are no numbers of float32.
LARGEST = 1e38
#: No tensor that is given has as many: such a one is expanded, and has no memory.
MOST_ELEMENTS = 2**36
#: Longer lists of strengths, distances and the like are never meant.
MOST_NUMBERS = 10**5


def a_kind(value: Any) -> str:
    """What kind of thing a value is, or a type, with its article.

    >>> a_kind(3), a_kind("text"), a_kind(torch.optim.AdamW), a_kind(torch.optim.SGD)
    ('an int', 'a str', 'an AdamW', 'an SGD')
    """
    name = (value if isinstance(value, type) else type(value)).__name__
    spelled = name[:1] in "FHLMNRSX" and name[1:2].isupper()  # S-G-D, R-M-S-prop
    return f"an {name}" if spelled or name[:1] in "AEIOaeio" else f"a {name}"


def shown(value: Any) -> str:
    """A value as an error shows it: short, and with its type where that is the point.

    >>> shown("x"), shown([1, 2]), shown(torch.zeros(2, 3))
    ("'x'", '[1, 2] (a list)', 'a tensor of shape (2, 3)')
    """
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        try:
            return f"{kind} of shape {tuple(value.shape)}"
        except RuntimeError:  # nested tensors have none
            return kind
    if isinstance(value, int) and abs(value) >= 10**40:
        return _digits(value)
    if value is None or type(value) in (bool, int, float, str):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    if type(value) in (list, tuple, dict, set):
        try:
            text = repr(value)
        except Exception:  # of something inside it; and what is nested too deeply has none
            return a_kind(value)
        return f"{text if len(text) <= 60 else text[:57] + '...'} ({a_kind(value)})"
    return a_kind(value)


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """A whole number between ``least`` and ``most``.

    >>> whole("period", np.int64(3), least=1)
    3
    >>> whole("period", 0, least=1)
    Traceback (most recent call last):
    ...
    ValueError: period must be a whole number >= 1, got 0
    """
    wanted = f"{name} must be a whole number >= {least}"
    if isinstance(value, (bool, np.bool_)) or not hasattr(type(value), "__index__") or _dimensions(value):
        raise TypeError(f"{wanted}, got {shown(value)}")
    try:
        plain = operator.index(value)
        if isinstance(plain, bool):  # of a tensor of truth values
            raise TypeError
    except Exception:  # a tensor that is no whole number, or has no content; something of the user's that fails
        raise TypeError(f"{wanted}, got {shown(value)}") from None
    if plain < least:
        raise ValueError(f"{wanted}, got {_digits(plain)}")
    if plain > most:
        raise ValueError(f"{name} must be at most {most}, got {_digits(plain)}")
    return plain


def number(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, *, above: float | None = None
) -> float:
    """A finite number from ``least`` to ``most``, or above ``above``; a tensor or array of one element is one.

    >>> number("alpha", torch.tensor(0.75), 0, 1)
    0.75
    >>> number("lr", float("nan"), least=0)
    Traceback (most recent call last):
    ...
    ValueError: lr must be a finite number >= 0, got nan
    """
    limits = [f"> {above:g}"] if above is not None else [f">= {least:g}"] * math.isfinite(least)
    plain = _plain(value)
    if math.isfinite(most) and (most < LARGEST or (plain is not None and plain > most)):
        limits.append(f"<= {most:g}")
    wanted = f"{name} must be a finite number {' and '.join(limits)}".rstrip()
    if plain is None:
        raise TypeError(f"{wanted}, got {shown(value)}")
    if not math.isfinite(plain) or not least <= plain <= most or (above is not None and not plain > above):
        raise ValueError(f"{wanted}, got {plain:g}")
    return plain


def numbers_of(name: str, value: Any, least: float = -math.inf, *, above: float | None = None) -> list[float]:
    """A sequence of finite numbers, at least one of them; a single number is a sequence of it.

    >>> numbers_of("sigmas", np.array([0.1, 0.2]), least=0)
    [0.1, 0.2]
    >>> numbers_of("sigmas", ["a"])
    Traceback (most recent call last):
    ...
    TypeError: sigmas must be a finite number, got 'a'
    """
    if isinstance(value, (Tensor, np.ndarray)):
        values = [value] if value.ndim == 0 else list(real_tensor(name, value, (1,), MOST_NUMBERS))
    else:
        values = [value] if isinstance(value, numbers.Real) else elements(name, value, "a sequence of numbers")
    if not values:
        raise ValueError(f"{name} must have at least one value, got none")
    return [number(name, each, least, above=above) for each in values]


def elements(name: str, value: Any, what: str) -> list[Any]:
    """What can be gone through, as a list, unless it has no end.

    >>> elements("seeds", iter([3, 4]), "a sequence of whole numbers")
    [3, 4]
    >>> elements("seeds", 3, "a sequence of whole numbers")
    Traceback (most recent call last):
    ...
    TypeError: seeds must be a sequence of whole numbers, got 3
    """
    text_or_other = isinstance(value, (str, bytes, dict, set, nn.Module))
    if text_or_other or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    values = up_to(MOST_NUMBERS + 1, name, value)
    if len(values) > MOST_NUMBERS:
        raise ValueError(f"{name} must have at most {MOST_NUMBERS} values, got more")
    return values


def up_to(most: int, name: str, value: Iterable[Any]) -> list[Any]:
    """The first elements of what can be gone through, which may have no end, or fail.

    >>> up_to(2, "seeds", itertools.count())
    [0, 1]
    """
    try:
        return list(itertools.islice(value, most))
    except Exception as error:  # of the user's
        raise TypeError(f"{name} cannot be gone through: {type(error).__name__}: {error!s:.200}") from error


def _digits(value: int) -> str:
    """A whole number, which may have thousands of digits."""
    return str(value) if abs(value) < 10**40 else f"a number of {int(math.log10(abs(value))) + 1} digits"


def _dimensions(value: Any) -> int:
    return getattr(value, "ndim", 0) if isinstance(value, (Tensor, np.ndarray)) else 0


def _plain(value: Any) -> float | None:
    """A Python number, None where there is none."""
    if isinstance(value, (Tensor, np.ndarray)):
        try:
            if isinstance(value, Tensor) and (value.is_complex() or value.is_meta or value.dtype == torch.bool):
                return None
            if (value.numel() if isinstance(value, Tensor) else 2 * np.iscomplexobj(value) + value.size) != 1:
                return None
            return float(value.item())
        except (TypeError, ValueError, RuntimeError):
            return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # a number of the user's own kind, which fails
        return None


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """One of some words.

    >>> choice("noise", "bach", ["batch", "example"])
    Traceback (most recent call last):
    ...
    ValueError: noise must be "batch" or "example", got 'bach'; did you mean "batch"?
    """
    words = list(options)
    if isinstance(value, str) and value in words:
        return value
    *first, last = [f'"{word}"' for word in words]
    wanted = f"{', '.join(first)} or {last}" if first else last
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"{name} must be {wanted}, got {shown(value)}{perhaps(value, words)}")


def perhaps(value: Any, words: Iterable[str]) -> str:
    """The end of a message about a word that is none of some: the nearest of them, if one is near.

    >>> perhaps("esdg", ["sgd", "esgd"]), perhaps("adam", ["sgd", "esgd"])
    ('; did you mean "esgd"?', '')
    """
    near = get_close_matches(value, list(words), 1) if isinstance(value, str) else []
    return f'; did you mean "{near[0]}"?' if near else ""


def flag(name: str, value: Any) -> bool:
    """Yes or no; 1 and 0 are taken for them.

    >>> flag("force", np.True_), flag("force", 0)
    (True, False)
    >>> flag("force", "no")
    Traceback (most recent call last):
    ...
    TypeError: force must be True or False, got 'no'
    """
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)}")


def network(value: Any, name: str = "model") -> nn.Module:
    """A torch module.

    >>> network(3)
    Traceback (most recent call last):
    ...
    TypeError: model must be a torch.nn.Module, got 3
    """
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, got {shown(value)}")
    try:
        _refuse_circles(value, set(), set())
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply, or contains itself: {a_kind(value)}") from None
    return value


def _refuse_circles(module: nn.Module, above: set[int], seen: set[int]) -> None:
    """Go through a network as torch does, which does not end in one that contains itself."""
    if id(module) in above:
        raise RecursionError
    if id(module) not in seen:
        seen.add(id(module))
        above.add(id(module))
        for child in module._modules.values():
            if child is not None:
                _refuse_circles(child, above, seen)
        above.remove(id(module))


def instance(name: str, value: Any, kind: type[T] | tuple[type[T], ...], what: str | None = None) -> T:
    """Something of one kind.

    >>> instance("other", 3, nn.Module, "a network")
    Traceback (most recent call last):
    ...
    TypeError: other must be a network, got 3
    """
    if not isinstance(value, kind):
        named = kind if isinstance(kind, type) else kind[0]
        raise TypeError(f"{name} must be {what or 'a ' + named.__name__}, got {shown(value)}")
    return value


def function(name: str, value: T, what: str = "a function") -> T:
    """Something that can be called.

    >>> function("closure", 3)
    Traceback (most recent call last):
    ...
    TypeError: closure must be a function, got 3
    """
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        raise TypeError(f"{name} must be {what}, got {shown(value)}")
    return value


def optimizer(name: str, value: Any) -> Optimizer:
    """What a function of the user's made, if it is a torch optimizer.

    >>> optimizer("what inner returns", None)
    Traceback (most recent call last):
    ...
    TypeError: what inner returns must be a torch optimizer, got None
    """
    if not isinstance(value, Optimizer):
        raise TypeError(f"{name} must be a torch optimizer, got {shown(value)}")
    return value


def maker(name: str, value: Any) -> Callable[..., Any]:
    """A class of optimizers, or a function that makes one of params.

    >>> maker("inner", torch.optim.AdamW).__name__
    'AdamW'
    """
    if not callable(value) or isinstance(value, nn.Module):
        raise TypeError(
            f"{name} must make an optimizer: a class of torch optimizers, such as torch.optim.AdamW, or "
            f"functools.partial(torch.optim.AdamW, weight_decay=0.1); got {shown(value)}"
        )
    return value


def real_tensor(name: str, value: Any, dimensions: tuple[int, ...] | None = None, most: int = MOST_ELEMENTS) -> Tensor:
    """A tensor of real numbers on a device, or an array or sequence that becomes one, of so many dimensions.

    >>> real_tensor("weights", [[1, 2]], (2,)).shape
    torch.Size([1, 2])
    >>> real_tensor("weights", [1, 2], (2, 3))
    Traceback (most recent call last):
    ...
    ValueError: weights must have 2 or 3 dimensions, got a tensor of shape (2,)
    """
    if isinstance(value, Tensor):
        if isinstance(value, UninitializedParameter) or value.is_nested:
            raise TypeError(f"{name} must be a dense tensor of real numbers, got {a_kind(value)} without a shape")
        tensor = value
    else:
        if not isinstance(value, (list, tuple, range, np.ndarray, numbers.Number)) and not hasattr(
            type(value), "__array__"
        ):
            raise TypeError(f"{name} must be a tensor, got {shown(value)}")
        if isinstance(value, range) and len(value) > MOST:
            raise ValueError(f"{name} must be a tensor, got {shown(value)}")
        try:
            tensor = torch.as_tensor(shareable(np.asarray(value)))
        except Exception:  # whatever it is that NumPy asks the elements for
            raise TypeError(f"{name} must be a tensor of numbers, got {shown(value)}") from None
    odd = {"complex": tensor.is_complex(), "without content": tensor.is_meta, "quantized": tensor.is_quantized}
    odd["sparse"] = tensor.layout is not torch.strided
    if any(odd.values()):
        what = next(name for name, holds in odd.items() if holds)
        raise TypeError(f"{name} must be a dense tensor of real numbers, got a {what} one")
    if tensor.numel() > most:
        raise ValueError(f"{name} must have at most {most} numbers, got {shown(tensor)}")
    if dimensions is not None and tensor.dim() not in dimensions:
        raise ValueError(f"{name} must have {' or '.join(map(str, dimensions))} dimensions, got {shown(tensor)}")
    return tensor


def shareable(array: np.ndarray) -> np.ndarray:
    """An array as torch takes it: in the machine's order of bytes and not backwards; and written to by no one else."""
    if array.dtype.kind in "biuf" and not (
        array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    ):
        return array.astype(array.dtype.newbyteorder("="))
    return array


def warn_user(message: str, *past: str) -> None:
    """Warn at the line of whoever called into the package, past its own frames, those of torch, and other folders.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_user("slow")
        >>> str(caught[0].message), "wideflat" in Path(caught[0].filename).parts
        ('slow', False)
    """
    inner = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent), *past)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def warn_of_low_lr(lr: float | Tensor) -> None:
    """Warn where the outer rate of Entropy-SGD looks like a learning rate that was meant for SGD.

    Args:
        lr: The outer rate; what is no rate at all is refused elsewhere, by name.
    """
    rate = _plain(lr)
    if rate is not None and 0 < rate < LOW_LR:
        warn_user(
            f"lr = {rate:g} is the outer rate of EntropySGD: after every L steps w goes that part of the way to where "
            "its explorer was, so training will be slow. The learning rate of SGD belongs into inner_lr: "
            f"lr=0.5, inner_lr={rate:g}"
        )
