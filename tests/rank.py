"""What one rank of a test does. `conftest.py` runs this file with ``RUN``, a dictionary that says what to call."""

import importlib.util
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map


def run(file, function, arguments, rank, world_size, port, sender):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        timeout = timedelta(seconds=200)  # a rank may be long in coming where the machine is busy
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        spec = importlib.util.spec_from_file_location("the_test", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, function)(*arguments)
        result = tree_map(lambda leaf: leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf, result)
        sender.send(("returned", result, ""))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        sender.send((type(error).__name__, str(error), traceback.format_exc()))
        os._exit(1)


if __name__ == "__rank__":
    run(**globals()["RUN"])
