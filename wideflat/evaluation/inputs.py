"""In which precision and order of memory a network gets its inputs: as they came, but for two things that are tried.

.. code-block:: text

    numbers of float64 (NumPy's)       become what the parameters are where the network does not take them as they are
    images, on the CPU                 have channels last, which is faster, where that gives the same outputs

A network that looks at memory itself (``view``, ``as_strided``) fails with the second or silently gives other outputs:
both orders are compared for the first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wideflat.evaluation.agreement import SLACK, agree
from wideflat.evaluation.blocks import cloned, random_state, restore_random_state

__all__ = ["InputForm"]

#: Applies a function to the inputs of a batch, and not to its targets.
OverInputs: TypeAlias = Callable[[Callable[[Any], Any], Any], Any]


class InputForm:
    """How a network is given its inputs, decided by what it does with the first ones.

    Args:
        model: The network.
        device: Where it is.

    Attributes:
        usual: Whether it was seen to need its images in the usual order.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self._device = device
        self._dtype = kinds.pop() if len(kinds) == 1 else None
        self._casts = False
        self._images = device.type == "cpu" and any(p.dim() == 4 for p in model.parameters())
        self._compared = not self._images
        self.usual = False

    def laid_out(self, inputs: Any) -> Any:
        """One input as the network likes it, as far as that is known."""
        if not isinstance(inputs, Tensor):
            return inputs
        if self._casts and inputs.dtype == torch.float64:
            inputs = inputs.to(self._dtype)
        if self._images and _is_image(inputs):
            inputs = inputs.contiguous(memory_format=torch.contiguous_format if self.usual else torch.channels_last)
        return inputs

    def answer(self, run: Callable[[Any], Any], batch: Any, over: OverInputs) -> Any:
        """What ``run`` makes of a batch, in another form where the network does not take it as it is.

        Args:
            run: Evaluates the network.
            batch: Inputs and targets, laid out.
            over: What in it are inputs.
        """
        if not self._compared and _any(_is_image, batch, over):
            self._compared = True
            self.usual = not self._order_does_not_matter(run, batch, over)
        batch = over(self.laid_out, batch)  # another form may have been decided since it was laid out
        try:
            return run(batch)
        except (RuntimeError, ValueError, TypeError) as error:
            if not self.usual and "view size is not compatible" in str(error):
                self.usual = True
            elif not self._casts and self._dtype not in (None, torch.float64) and _any(_is_double, batch, over):
                self._casts = True
            else:
                raise
        return self.answer(run, batch, over)

    def _order_does_not_matter(self, run: Callable[[Any], Any], batch: Any, over: OverInputs) -> bool:
        """Whether outputs are the same for images with channels last; a network that fails is asked again later."""
        found = []
        with torch.no_grad():
            for order in (_in_usual_order, lambda image: image):
                state = random_state(self._device)
                try:
                    found.append(run(over(order, cloned(batch))))
                except (RuntimeError, ValueError, TypeError) as error:
                    return "view size is not compatible" not in str(error)
                finally:
                    restore_random_state(state)
        return agree(found[0][0], found[1][0], slack=SLACK)


def _is_image(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dim() == 4


def _is_double(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64


def _any(kind: Callable[[Any], bool], batch: Any, over: OverInputs) -> bool:
    """Whether an input of a batch is of a kind."""
    found: list[bool] = []
    over(lambda leaf: found.append(kind(leaf)) or leaf, batch)  # type: ignore[func-returns-value]
    return any(found)


def _in_usual_order(leaf: Any) -> Any:
    """Images in memory as torch lays them out by default."""
    return leaf.contiguous() if _is_image(leaf) else leaf
