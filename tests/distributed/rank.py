"""What one rank of a test does; `conftest.py` sets the names in capitals."""

import importlib.util
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

if __name__ == "__rank__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", PORT, is_master=False, wait_for_workers=False)  # noqa: F821
        dist.init_process_group(
            "gloo",
            store=store,
            rank=RANK,
            world_size=WORLD_SIZE,
            timeout=timedelta(seconds=20),  # noqa: F821
        )
        spec = importlib.util.spec_from_file_location("the_test", FILE)  # noqa: F821
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        result = getattr(module, FUNCTION)(*ARGUMENTS)  # noqa: F821
        result = tree_map(lambda leaf: leaf.detach().numpy() if isinstance(leaf, torch.Tensor) else leaf, result)
        SENDER.send(("returned", result, ""))  # noqa: F821
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        SENDER.send((type(error).__name__, str(error), traceback.format_exc()))  # noqa: F821
        os._exit(1)
