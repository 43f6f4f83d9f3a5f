"""Contradictions that a device finds and the host reads later, so that no evaluation waits for them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Doubts"]


class Doubts:
    """What would be an error, as flags on their devices.

    Example:
        >>> doubts = Doubts()
        >>> doubts.refuse(torch.tensor(False), "never")
        >>> doubts.refuse(torch.tensor(True), "labels must be classes")  # on the CPU at once, elsewhere when settled
        Traceback (most recent call last):
        ValueError: labels must be classes
    """

    def __init__(self) -> None:
        self._flags: dict[str, Tensor] = {}

    def refuse(self, flag: Tensor, why: str) -> None:
        """An error in these words if the flag is set: at once where nobody has to wait for it, else when settled."""
        if flag.device.type == "cpu":
            if bool(flag):
                raise ValueError(why)
            return
        known = self._flags.get(why)
        self._flags[why] = flag if known is None else known | flag

    def settle(self) -> None:
        """Read the flags.

        Raises:
            ValueError: In the words of the first that is set.
        """
        flags, self._flags = self._flags, {}
        if flags:
            for why, found in zip(flags, torch.stack(list(flags.values())).tolist(), strict=True):
                if found:
                    raise ValueError(why)
