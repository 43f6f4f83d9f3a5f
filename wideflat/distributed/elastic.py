"""Replicas that die and come back: the barycenter is over those that are alive, and nobody stops for the others.

Every replica is a job of its own (one process, or several under its own ``torchrun``) that knows the others only
through torchft: a lighthouse that says who is alive, and a process group that is made anew whenever that changes.

.. code-block:: text

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 2000        # anywhere; or start_lighthouse()

    group = ElasticReplicas(model, index=a, num_replicas=3, lighthouse="http://host:29510")
    coupling = wideflat.ReplicaCoupling(group, period=10, gamma=...)
    group.join()                            # waits for the others at the beginning; later joins them where they are
    while coupling.calls < total:
        ... backward(); coupling.couple(); opt.step()
    with coupling.at_barycenter(): evaluate(model)
    group.leave()

What happens when

========================================  =============================================================================
a replica is killed                       the others find their connections broken or its heartbeat gone, repeat the
                                          exchange without it, and go on; they wait for at most the heartbeat timeout
                                          of the lighthouse plus one exchange
a replica comes (back)                    it takes part in the next exchange with weight zero, so it receives the
                                          barycenter of the others and their counters, and starts from there
an exchange fails for some and not for    those for whom it failed meet the others at the next one, keep their weights
others                                    and take over the counters
all but one are killed                    the last one trains alone, and its weights are the barycenter
the lighthouse is killed                  the replicas wait for it to be started again at the same address
========================================  =============================================================================

States that one replica hands to another are read with ``weights_only=True``; still, torchft's servers listen on all
addresses of a machine: use them in a network that you trust.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

os.environ.setdefault("RUST_LOG", "error")  # torchft's servers write several lines a meeting otherwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wideflat.distributed.group import Block, square_distance
from wideflat.distributed.lighthouse import start_lighthouse, wait_for_lighthouse
from wideflat.distributed.mesh import FlatBuckets, local
from wideflat.kernels.flat_blocks import cache_blocks
from wideflat.kernels.float64 import has_float64, in_parts

try:
    from torchft.checkpointing._serialization import _streaming_load
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL
except ModuleNotFoundError as missing:
    if missing.name != "torchft":
        raise
    raise ModuleNotFoundError(
        "replicas that survive losses need torchft: pip install 'wideflat[distributed]'", name="torchft"
    ) from None

__all__ = ["ElasticReplicas", "OutOfStep", "start_lighthouse"]

#: How often the lighthouse is asked again within ``patience`` when it does not answer.
RETRIES = 20
#: How many of the last exchanges are remembered with the seconds that they took: all of them would fill the memory.
WAITS = 1000

_logger = logging.getLogger(__name__)

#: What a replica is about in a meeting; all must agree.
COUPLE, GATHER = 0, 1


class OutOfStep(RuntimeError):
    """A replica has come back while the others were being set up; after `ElasticReplicas.forget` it can join them."""


class _Transport(HTTPTransport):
    """torchft's way to hand over a state, without unpickling anything but tensors and plain values."""

    def __init__(self, timeout: timedelta, host: str) -> None:
        self.host = host
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        return f"http://{self.host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer:
            return _streaming_load(answer, weights_only=True)


class ElasticReplicas:
    """The replicas that are alive, one in each job: a `wideflat.replicas.ReplicaGroup` for `wideflat.ReplicaCoupling`.

    Args:
        model: The network of this replica.
        index: Which replica this is, 0 to ``num_replicas`` - 1. A job that comes back has the index it had.
        num_replicas: How many there are when all are alive. `join` waits for them at the beginning.
        lighthouse: Its address, ``http://host:port``; by default the environment variable ``TORCHFT_LIGHTHOUSE``.
        state_dict: Gives what a replica that comes back must know beside the weights: counters, schedules. Plain values
            and tensors.
        load_state_dict: Takes that over.
        start_from: ``"barycenter"``, or ``"replica"``: the weights of one that is alive.
        exchanges: Those that this replica has taken part in, if it was restored from a checkpoint (`exchanges`).
        timeout: Seconds after which an exchange with a replica that does not answer has failed.
        start_timeout: Seconds that `join` waits for all replicas at the beginning.
        patience: Seconds without a single successful meeting (no lighthouse, say) after which the training gives up.
        host: The name or address under which other replicas reach this machine.
        say: Where messages go: who has left, who has come.

    Attributes:
        exchanges: How many there were so far.
        alive: The indices of the replicas in the last one.
        waits: Seconds that each of the last 1,000 took.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        index: int,
        num_replicas: int,
        lighthouse: str | None = None,
        state_dict: Callable[[], dict[str, Any]] = dict,
        load_state_dict: Callable[[dict[str, Any]], object] = lambda state: None,
        start_from: str = "barycenter",
        exchanges: int = 0,
        timeout: float = 30.0,
        start_timeout: float = 60.0,
        patience: float = 600.0,
        host: str | None = None,
        say: Callable[[str], object] = _logger.info,
    ) -> None:
        if not 0 <= index < num_replicas:
            raise ValueError(f"index must be at least 0 and below num_replicas = {num_replicas}, got {index}")
        if start_from not in ("barycenter", "replica"):
            raise ValueError(f"start_from must be 'barycenter' or 'replica', got {start_from!r}")
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ValueError(
                "no lighthouse: start one with `torchft_lighthouse --min_replicas 1` and give its address, "
                "http://HOST:29510, as lighthouse= or in the environment variable TORCHFT_LIGHTHOUSE"
            )
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.index, self.num_replicas = index, num_replicas
        self.start_from, self.start_timeout, self.patience, self.say = start_from, start_timeout, patience, say
        self.alive: list[int] = []
        self.waits: deque[float] = deque(maxlen=WAITS)
        self._state_dict, self._load_state_dict = state_dict, load_state_dict
        self._weights = [local(p).detach() for p in self.model.parameters() if p.requires_grad]
        self._buckets = FlatBuckets(self._weights)
        self._device = self._weights[0].device
        self._joined = exchanges > 0
        self._takes_barycenter = self._healed = False
        self._restarts = 0
        self._given: list[Tensor] | None = None
        host = host or socket.gethostname()
        limit = timedelta(seconds=timeout)
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world_size == 1:
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            where = (host, self._store.port)
        else:
            where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        for name in ("torchft.manager", "torchft_errors", "torchft.checkpointing.http_transport"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they print tracebacks of what is handled here
        wait_for_lighthouse(lighthouse, patience)
        self._manager = Manager(
            pg=(ProcessGroupNCCL if self._device.type == "cuda" else ProcessGroupGloo)(timeout=limit),
            load_state_dict=self._take_over,
            state_dict=self._hand_over,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=patience),
            connect_timeout=limit,
            rank=rank,
            world_size=world_size,
            store_addr=where[0],
            store_port=where[1],
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{index}",
            hostname=host,
            checkpoint_transport=_Transport(limit, host),
            init_sync=False,  # the replicas start from weights of their own
            quorum_retries=RETRIES,
        )
        self._manager.load_state_dict({"step": exchanges, "batches_committed": 0})

    # --------------------------------------------------------------------------------------------- coming and going

    def join(self) -> bool:
        """Meet the other replicas for the first time.

        At the beginning of a training all replicas wait here for each other, ``start_timeout`` seconds at most. One
        that comes later, or again, takes over the state of the others. Returns whether they were training already, so
        that weights and counters are theirs now.
        """
        deadline = time.monotonic() + self.start_timeout
        failures = _Failures(self.patience)
        while True:
            try:
                self._start_meeting()
                came_back = self._healed
                if self._attempt(COUPLE, None, waits_until=deadline) is not None:
                    return came_back
                time.sleep(0.1)
            except Exception as error:
                failures.add(error)

    def hand_over(
        self, state_dict: Callable[[], dict[str, Any]], load_state_dict: Callable[[dict[str, Any]], object]
    ) -> None:
        """Say what a replica that comes back is told, and what it does with it; as the arguments of the class."""
        self._state_dict, self._load_state_dict = state_dict, load_state_dict

    def forget(self) -> None:
        """Be as one that has never met the others, so that the next `join` takes over from them."""
        self._joined = self._takes_barycenter = self._healed = False
        self._given = None
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})

    def leave(self) -> None:
        """Go without troubling the others: at the end of the training."""
        self._manager.shutdown(wait=False)

    def __enter__(self) -> ElasticReplicas:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @property
    def exchanges(self) -> int:
        """How many there were so far; goes into a checkpoint."""
        return self._manager.current_step()

    def _hand_over(self) -> dict[str, Any]:
        """What a replica that is behind gets to know."""
        state: dict[str, Any] = {
            "exchanges": self.exchanges,
            "buffers": [buffer.detach().cpu() for buffer in self.model.buffers()],
            "user": self._state_dict(),
        }
        if self.start_from == "replica":
            state["weights"] = [w.cpu() for w in self._weights]
        return state

    def _take_over(self, state: dict[str, Any]) -> None:
        """Go where the others are. Who has merely missed a meeting keeps its weights."""
        self._healed = True
        missed = state["exchanges"] - self.exchanges if self._joined else None
        if missed is None or missed > 1:
            self._takes_barycenter = True
            self._given = state.get("weights")
            for buffer, value in zip(self.model.buffers(), state["buffers"], strict=True):
                buffer.copy_(value)
        self._load_state_dict(state["user"])

    # ------------------------------------------------------------------------------------------------------ meetings

    def _start_meeting(self) -> None:
        """Find out who is there, and connect to them."""
        self._healed = False
        try:
            self._manager.start_quorum()
        except Exception:
            self._manager._quorum_future = None  # or it would be raised again by the next one
            raise
        if error := self._manager.errored():
            self._manager.should_commit()
            raise RuntimeError(f"could not connect to the other replicas: {error.original_exception}")

    def _sum(self, tensors: list[Tensor]) -> None:
        for work in [self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM) for tensor in tensors]:
            work.wait()

    def _attempt(self, kind: int, value: float | None, waits_until: float | None = None) -> Tensor | None:
        """Sum weights and numbers over those who are there; None if that failed, or if it is too early.

        All do the same, whether they train or only join. The numbers are: how many weights were added; how many came
        for each kind of meeting; how many train already or have waited long enough; who is there (1, or 2: without
        weights, since it was lost and has come back); one value of each, in parts of float32 without float64.
        """
        y = self.num_replicas
        weight = 0.0 if self._takes_barycenter else 1.0
        ready = waits_until is None or time.monotonic() > waits_until
        dtype, parts = (torch.float64, 1) if has_float64(self._device) else (torch.float32, 3)
        head = torch.zeros(4 + y + parts * y, dtype=dtype, device=self._device)
        head[0], head[1 + kind], head[3], head[4 + self.index] = weight, weight, float(ready), 2.0 - weight
        if value is not None:
            start = 4 + y + parts * self.index
            head[start : start + parts] = torch.tensor(in_parts(value, parts), dtype=dtype)
        for number, flat in enumerate(self._buckets.flat):
            self._buckets.fill(number, self._weights) if weight else flat.zero_()
        self._sum([head, *self._buckets.flat])
        presence = head[4 : 4 + y]
        present = presence > 0
        if self._manager.errored() is None and not head[3].item() > 0 and not present.all():
            return None  # the beginning: all who are here wait for the others
        if not self._manager.should_commit():
            return None
        if not (count := head[0].item()) > 0:
            raise RuntimeError("no replica in this meeting has weights: all have just come back")
        if head[1 + COUPLE].item() > 0 and head[1 + GATHER].item() > 0:  # those who are set up give way
            if kind == COUPLE:
                return None
            raise OutOfStep("others were training already while this replica was being set up")
        for flat in self._buckets.flat:
            flat.div_(count)
        self._notice(present.nonzero().flatten().tolist(), (presence > 1).nonzero().flatten().tolist())
        if self._takes_barycenter:
            self._start_here()
        self._joined = True
        return head[4 + y :].cpu().double().view(y, parts).sum(1)

    @torch.no_grad()
    def _start_here(self) -> None:
        """Take the barycenter that the others have formed (or the weights that one of them gave)."""
        for indices, views in zip(self._buckets.indices, self._buckets.views, strict=True):
            source = views if self._given is None else [self._given[i] for i in indices]
            for i, value in zip(indices, source, strict=True):
                self._weights[i].copy_(value)
        self._takes_barycenter, self._given = False, None
        self._restarts += 1

    def _notice(self, alive: list[int], new: list[int]) -> None:
        """Say who has left, who has come, and who was lost and has come back between two meetings."""
        before, self.alive = self.alive, alive
        count = f"{len(alive)} of {self.num_replicas} are alive"
        if not before:
            self.say(f"replica {self.index} is with {alive}; {count}")
            return
        for a in sorted(set(before) - set(alive)):
            self.say(f"replica {a} has gone; {count}")
        for a in sorted(set(alive) - set(before)):
            self.say(f"replica {a} has come (back); {count}")
        for a in sorted(set(new) & set(before)):
            self.say(f"replica {a} was lost and has come back since the last meeting; {count}")

    def exchange(self, kind: int = COUPLE, value: float | None = None) -> Tensor:
        """One meeting of all that are alive, repeated until it succeeds; afterwards the buckets hold the barycenter."""
        if not self._joined:
            raise RuntimeError("call join() before the training, so that this replica meets the others")
        start = time.monotonic()
        failures = _Failures(self.patience)
        while True:
            try:
                self._start_meeting()
                values = self._attempt(kind, value)
                if values is not None:
                    self.waits.append(time.monotonic() - start)
                    return values
            except Exception as error:
                failures.add(error)

    # ----------------------------------------------------------------------------------------------- as a ReplicaGroup

    @property
    def members(self) -> list[list[Tensor]]:
        """The trainable parameters of this replica."""
        return [[p for p in self.model.parameters() if p.requires_grad]]

    def buffers(self) -> Iterator[Tensor]:
        """The buffers of the network."""
        return self.model.buffers()

    @torch.no_grad()
    def blocks(self, members: list[list[Tensor]], *others: list[Tensor]) -> Iterator[Block]:
        """Meet; then weights, other lists and the barycenter of those alive, block by block."""
        if len(members[0]) != len(self._weights):
            raise ValueError("the whole network is exchanged at each meeting; give all parameters one learning rate")
        rest = [[local(tensor) for tensor in tensors] for tensors in others]
        before = self._restarts
        self.exchange()
        if self._restarts > before:  # it was far behind and has new weights: the gradients are of the old ones
            for tensors in rest:
                torch._foreach_zero_(tensors)
        for indices, views in zip(self._buckets.indices, self._buckets.views, strict=True):
            lists = [[tensors[i] for i in indices] for tensors in (self._weights, *rest)]
            for mine, *pieces in cache_blocks(*lists, views):
                yield [mine], pieces[:-1], pieces[-1]

    def distances(self) -> Tensor:
        """d(w_a, w_bar) of this replica, to the barycenter of the last meeting."""
        square = torch.zeros((), dtype=torch.float64)
        for indices, views in zip(self._buckets.indices, self._buckets.views, strict=True):
            square += square_distance([self._weights[i] for i in indices], views)
        return square.reshape(1) / 2

    def gather(self, values: Tensor) -> Tensor:
        """The number of this replica alone: others are asked at meetings only, and these are for the barycenter."""
        return values

    def total(self, values: Tensor) -> Tensor:
        """The sum over the replicas that are alive, in a meeting of its own. Only before the training."""
        return self.exchange(GATHER, values.item())[self.alive].sum()

    def barycenter(self, at_barycenter: Callable[[], AbstractContextManager[None]], buffers: str) -> nn.Module:
        """A copy of the network at the barycenter, with the buffers of this replica."""
        with at_barycenter():
            center = copy.deepcopy(self.model)
        center.zero_grad(set_to_none=True)
        return center

    def prefetch(self, *members: list[Tensor]) -> bool:
        """Nothing: a meeting that may fail is not started early."""
        return False

    send = prefetch

    def check(self) -> None:
        """Nothing: `join` has met the others."""


class _Failures:
    """Errors on the way to a successful meeting, borne for a while."""

    def __init__(self, patience: float) -> None:
        self.deadline = time.monotonic() + patience

    def add(self, error: Exception) -> None:
        if time.monotonic() > self.deadline or isinstance(error, (ValueError, OutOfStep)):
            raise error
        time.sleep(0.05)
