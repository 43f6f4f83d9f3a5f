"""A device that is not there, with values: tensors that say they are on the meta device and hold their numbers.

There is no accelerator where this is tested. Inside `PlayedDevice()` whatever is put on the meta device is computed on
the CPU and stays "on the device" until it is fetched, so that every path takes it for that of an accelerator. The mode
counts what is launched and what the host waits for, and can refuse float64, as MPS does.
"""

import contextlib
import os
import traceback
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import wideflat
from wideflat.kernels.counter import table_on

DEVICE = torch.device("meta")

#: Operations whose answer, or the size of it, the host waits for.
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero", "masked_select", "_unique2", "unique_dim"}
#: What launches nothing.
VIEWS = {"detach", "view", "as_strided", "split_with_sizes", "slice", "alias", "empty_like", "empty_strided", "empty"}
VIEWS |= {"split", "unbind", "select", "t", "unsqueeze", "squeeze", "expand", "permute", "transpose", "_unsafe_view"}
VIEWS |= {"_reshape_alias", "new_empty", "diagonal", "lift_fresh"}


class OnDevice(torch.Tensor):
    """A tensor of the device; `held` are its numbers."""

    held: torch.Tensor
    is_meta = False  # it has values

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @property
    def data(self):
        return OnDevice(self.held)

    @data.setter
    def data(self, other):
        torch.Tensor.data.__set__(self, other)
        self.held = other.held

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.held.data_ptr()

    def untyped_storage(self):
        return self.held.untyped_storage()

    def __repr__(self):
        return f"OnDevice({self.held})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} outside of the played device")


class PlayedDevice(TorchDispatchMode):
    """Plays the device.

    Attributes:
        launches: Operations on the device that are no views, by their names.
        waits: What the host waited for, by the operation and the line of the package.
    """

    def __init__(self, has_float64=True):
        super().__init__()
        self.has_float64 = has_float64
        self.launches, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = there = any(isinstance(tensor, OnDevice) for tensor in given)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == DEVICE.type
            kwargs["device"] = torch.device("cpu")
        held = tree_map(lambda leaf: leaf.held if isinstance(leaf, OnDevice) else leaf, (args, kwargs))
        result = func(*held[0], **held[1])
        known = {id(tensor.held): tensor for tensor in given if isinstance(tensor, OnDevice)}
        self._look(func, args, here, there, result)

        def outer(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in known:  # written in place
                return known[id(leaf)]
            return OnDevice(leaf) if there else leaf

        return tree_map(outer, result)

    def _look(self, func, args, here, there, result):
        name = func.overloadpacket.__name__
        if here or there:
            self.launches[name] += name not in VIEWS
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if there and not self.has_float64 and any(tensor.dtype == torch.float64 for tensor in made):
            raise TypeError(f"{name}: the device has no float64")
        fetched = name == "copy_" and isinstance(args[1], OnDevice) and not isinstance(args[0], OnDevice)
        masked = name.startswith("index") and any(
            isinstance(leaf, OnDevice) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1:2])
        )
        if here and (name in WAITING or masked or fetched or (name == "_to_copy" and not there)):
            self.waits[f"{name} at {_place()}"] += 1


def _place():
    """The innermost line of the package."""
    root = os.path.dirname(wideflat.__file__)
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(root)]
    return f"{os.path.relpath(frames[-1].filename, root)}:{frames[-1].lineno}" if frames else "?"


@contextlib.contextmanager
def played(has_float64=True):
    """The device, of which the package knows whether it has float64."""
    make = torch.tensor

    def tensor(data, *, device=None, **more):  # torch makes it where no mode sees it
        there = device is not None and torch.device(device).type == DEVICE.type
        return make(data, **more).to(DEVICE) if there else make(data, device=device, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr("wideflat.kernels.float64.WITHOUT", {"mps"} if has_float64 else {"mps", DEVICE.type})
        table_on.cache_clear()  # what is kept for the meta device has no values, or is of another play
        try:
            with PlayedDevice(has_float64) as device:
                yield device
        finally:
            table_on.cache_clear()
