"""``wideflat train`` on the ranks of ``torchrun``.

The training is that of :mod:`wideflat.training.training`, step by step: weights, data and noise of replica ``a`` are
functions of the seed and of ``a``, wherever it is computed. With more ranks than replicas, those of a replica divide
its mini-batches (:mod:`wideflat.distributed.split_batch`). The run on disk is the same too, written by the first rank,
so a run can be started in one process and be continued on several, or the other way round.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wideflat.data import ImageData
from wideflat.distributed.mesh import MeshReplicas, ending_together
from wideflat.distributed.split_batch import SplitBatch
from wideflat.presets import Preset
from wideflat.progress import Progress
from wideflat.seeds import derive_seed
from wideflat.training.algorithms import Place
from wideflat.training.runs import Run
from wideflat.training.training import (
    CHECK_EVERY,
    Evaluation,
    Interrupted,
    Options,
    Training,
    _Clock,
    _figures,
    _result,
    _save_snapshot,
    _stop_requests,
    _tensorboard,
    _text,
    evaluate,
    run_held,
)

__all__ = ["RankTraining", "on_torchrun", "replica_mesh", "train_on_ranks"]

#: Iterations between two moments at which the ranks agree on whether to save or to stop.
AGREE_EVERY = 10


def on_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


@contextlib.contextmanager
def replica_mesh(num_replicas: int, device: torch.device, timeout: float = 600.0):  # type: ignore[no-untyped-def]
    """The mesh ("replica", "dp") of a training under ``torchrun``. Yields (mesh, device of this rank).

    Args:
        num_replicas: y; the number of ranks must be a multiple of it.
        device: ``cpu`` (gloo) or ``cuda`` (NCCL, the GPU numbered like the rank on its machine).
        timeout: Seconds after which a rank that does not answer is given up.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % num_replicas:
        raise ValueError(
            f"this training has {num_replicas} replicas and torchrun has started {ranks} ranks, which cannot be "
            f"divided among them equally: give --nproc-per-node {num_replicas} or {2 * num_replicas} or ... (times "
            f"--nnodes, where there are several machines), or --num-replicas {ranks}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        shape = num_replicas, ranks // num_replicas
        yield init_device_mesh(device.type, shape, mesh_dim_names=("replica", "dp")), device
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


class RankTraining(Training):
    """The training of one replica on this rank (or of a part of its mini-batches), of the others on the others.

    What it says about the whole training (metrics, states) it says on every rank, after asking the others; so every
    rank must ask at the same time.

    The ranks of one replica hold the same weights. Together they compute the gradient of its mini-batch, batch norm
    included; only dropout and other noise inside the network is drawn for each rank, so it is not that of one process.

    Args:
        experiment: What to train.
        data: The images.
        options: How to compute.
        device: Where.
        mesh: With the dimensions ("replica", "dp"): as many replicas as the experiment has, and ranks for each.
    """

    def __init__(
        self, experiment: Preset, data: ImageData, options: Options, device: torch.device, mesh: DeviceMesh
    ) -> None:
        if mesh["replica"].size() != experiment.num_replicas:
            raise ValueError(f"the mesh is for {mesh['replica'].size()} replicas, not for {experiment.num_replicas}")
        self.mesh = mesh
        self.replica_group = mesh["replica"].get_group()
        self.ranks_per_replica = mesh["dp"].size()
        self.share = mesh["dp"].get_local_rank()
        self._split: SplitBatch | None = None
        place = Place(mesh["replica"].get_local_rank(), lambda network: MeshReplicas(network, mesh["replica"]))
        super().__init__(experiment, data, options, device, place)

    # ---- one iteration

    def iterate(self) -> torch.Tensor:
        """One iteration; the barycenter travels while the gradients are computed."""
        if self.learner.coupling is not None:
            self.learner.set_progress(self.tau)
            self.learner.coupling.prefetch()
        return super().iterate()

    @property
    def split(self) -> SplitBatch:
        """The network here, its mini-batches divided over the ranks of its replica."""
        if self._split is None:
            self._split = SplitBatch(self.learner.networks[0], self.mesh["dp"])
        return self._split

    def _batch(self, a: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = super()._batch(a, step)
        return batch if self.ranks_per_replica == 1 else self.split.share(*batch)

    def _backward(self, a: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of the whole mini-batch; the loss and the outputs of this rank's part of it."""
        if self.ranks_per_replica == 1:
            return super()._backward(a, x, y)
        self._seed_noise(self.here[a] if self.experiment.parted(self.tau) else 0)
        with self._autocast():
            logits = self.split(x)
            loss = self.split.loss(logits, y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        own = loss.detach() * (self.split.whole / self.ranks_per_replica / max(len(y), 1))
        return own, logits.detach()

    def _first_gradients(self, a: int) -> Callable[[], torch.Tensor]:
        gradients = super()._first_gradients(a)
        if self.ranks_per_replica == 1:
            return gradients

        def together() -> torch.Tensor:
            share = gradients() * len(range(self.split.whole)[self.split.part])
            return self.split.mean(share * (self.ranks_per_replica / self.split.whole))

        return together

    def _seed_noise(self, a: int) -> None:
        super()._seed_noise(a)
        if self.share:  # the other parts of the mini-batch have other noise
            torch.manual_seed(derive_seed(self.options.seed, "noise", a, self.step, self.share))

    # ---- what all ranks know together

    def everywhere(self, value: Any) -> list[Any]:
        """The value of each rank, on all of them; any Python object. Ranks of one replica are neighbours."""
        values: list[Any] = [None] * self.mesh.size()
        dist.all_gather_object(values, value)
        return values

    def of_replicas(self, value: Any) -> list[Any]:
        """The value of each replica (that of its first rank), on all ranks."""
        return self.everywhere(value if self.share == 0 else None)[:: self.ranks_per_replica]

    @property
    def knows_replicas(self) -> bool:
        """The other ranks are asked."""
        return self.experiment.num_replicas > 1

    def evaluate_replicas(self) -> Evaluation:
        """Every replica on the test set, and their ensemble."""

        def everyone(probabilities: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(probabilities, group=self.replica_group)
            return probabilities

        own = evaluate(self.learner.networks, self._plain("test"), votes=everyone)
        parts = self.of_replicas((own.errors[0], own.losses[0]))
        return Evaluation(tuple(e for e, _ in parts), tuple(loss for _, loss in parts), own.ensemble_error)

    def close_epoch(self, evaluate: bool = True) -> dict[str, Any]:
        """The row of metrics of the epoch, over all replicas."""
        sums = self.everywhere((float(self._loss_sum), int(self._wrong), self._count, self._inner_distance))
        self._count = max(self._count, 1)  # a rank may have had no image at all
        row = super().close_epoch(evaluate)
        count = sum(part[2] for part in sums)
        row["train_loss"] = sum(part[0] for part in sums) / count
        row["train_error"] = sum(part[1] for part in sums) / count
        if row.get("inner_distance") is not None:
            row["inner_distance"] = sum(part[3] for part in sums) / len(sums)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole training, as one process would have it."""
        own = _to_cpu(super().state_dict())
        sums = [part["sums"] for part in self.everywhere({"sums": own["sums"]})]
        parts = self.of_replicas(own)
        whole = parts[0]
        for part in parts[1:]:
            for name in ("networks", "optimizers"):
                whole["learner"][name] += part["learner"][name]
        whole["sums"] |= {name: sum(each[name] for each in sums) for name in ("loss", "wrong", "count")}
        if self.experiment.algorithm == "parle":  # focusing of every optimizer, then that of the coupling
            whole["learner"]["focusing"] = [
                *(part["learner"]["focusing"][0] for part in parts),
                whole["learner"]["focusing"][-1],
            ]
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's part of the state of a whole training."""
        a, learner = self.here[0], dict(state["learner"])
        for name in ("networks", "optimizers"):
            learner[name] = [learner[name][a]]
        if self.experiment.algorithm == "parle":
            learner["focusing"] = [learner["focusing"][a], learner["focusing"][-1]]
        sums = state["sums"]
        if a or self.share:  # the sums of an epoch so far stay with the first rank
            sums = {**sums, "loss": 0 * sums["loss"], "wrong": 0 * sums["wrong"], "count": 0}
        super().load_state_dict({**state, "learner": learner, "sums": sums})


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(item) for item in value)
    return value


def train_on_ranks(
    experiment: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options | None = None,
    *,
    device: torch.device | str = "cpu",
    say: Callable[[str], object] = lambda text: None,
    **how: Any,
) -> Run | None:
    """`train` on the ranks of ``torchrun``, one or several for each replica; all ranks call it.

    The first rank keeps the run on disk, in the same form as one process does.

    Args:
        experiment: As for `wideflat.training.training.train`, and so are the others.
        out: See there.
        data: See there.
        options: See there.
        device: See there.
        say: See there; called on the first rank.
        **how: ``snapshots``, ``checkpoint_minutes``, ``tensorboard`` and ``progress``: see there.

    Returns:
        The run on the first rank, None on the others.
    """
    options = options or Options()
    with (
        replica_mesh(experiment.num_replicas, torch.device(device)) as (mesh, own_device),
        ending_together(),
        contextlib.ExitStack() as stack,
    ):
        training = RankTraining(experiment, data, options, own_device, mesh)
        run: Run | None = None
        tell: Callable[[str], object] = lambda message: None  # noqa: E731 # of the other ranks
        if dist.get_rank() == 0:
            held = run_held(experiment, out, data, options, say, ranks=mesh.size())
            run, tell = stack.enter_context(held)
        finished = run is not None and run.result() is not None
        found = training.everywhere((finished, None if run is None or finished else run.restore(tell)))[0]
        if found[0]:
            return run
        if found[1] is not None:
            training.load_state_dict(found[1])
            tell(f"resumed {out} at epoch {training.tau:.2f} of {experiment.epochs} on {mesh.size()} ranks")
        elif 0 in how.get("snapshots", ()):
            _snapshot(run, training, {"epoch": 0})
        _loop(training, run, say, tell, **how)
        result = _last(run, training)
        tell(f"finished {out}: test error {100 * result['test_error']:.2f} %")
        return run


def _loop(
    training: RankTraining,
    run: Run | None,
    say: Callable[[str], object],
    tell: Callable[[str], object],
    snapshots: Sequence[int] = (),
    checkpoint_minutes: float = 5.0,
    tensorboard: bool = True,
    progress: bool = True,
) -> None:
    experiment, options = training.experiment, training.options
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_requests())
        write_scalars = stack.enter_context(_tensorboard(run, training.epoch, tensorboard)) if run else None
        bar = stack.enter_context(
            Progress(
                f"{experiment.name} {experiment.algorithm}",
                training.total_steps,
                progress and run is not None,
                before=training.step,
            )
        )
        clock = _Clock(training, checkpoint_minutes)
        while training.step < training.total_steps:
            loss = training.iterate()
            at_end = training.at_epoch_end
            if at_end:
                training.check()
                clock.trained()
                due = training.epoch % options.evaluate_every == 0 or training.step == training.total_steps
                row = training.close_epoch(evaluate=due)
                if run is not None and write_scalars is not None:
                    run.append("metrics", row)
                    run.append("timing", clock.row())
                    write_scalars(row)
                    bar.update(training.step, **_figures(row))
                    say(f"epoch {row['epoch']}/{experiment.epochs}  {_text(row)}")
                if training.epoch in snapshots:
                    _snapshot(run, training, row)
            elif training.step % CHECK_EVERY == 0:
                training.check()
            if run is not None and clock.show_is_due():
                bar.update(training.step, loss=float(loss))
            if not at_end and training.step % AGREE_EVERY:
                continue
            wishes = training.everywhere((stop[0].name if stop else None, clock.save_is_due()))
            asked = next((name for name, _ in wishes if name), None)
            if at_end or asked or wishes[0][1]:
                state = training.state_dict()
                if run is not None:
                    run.save_checkpoint(training.step, state)
                clock.saved()
            if asked and training.step < training.total_steps:
                message = (
                    f"stopped by {asked} at epoch {training.tau:.2f} of {experiment.epochs}; the run is saved: start "
                    "the same command again to go on"
                )
                tell(message)
                raise Interrupted(message)


def _snapshot(run: Run | None, training: Training, row: dict[str, Any]) -> None:
    if run is not None:
        _save_snapshot(run, training, row)
    else:
        training.center(len(training.data.train))


def _last(run: Run | None, training: RankTraining) -> dict[str, Any]:
    """The final model and its errors; every rank takes part in finding them, the first one writes them."""
    center = training.center(len(training.data.train))
    result = _result(training, center)
    if run is not None:
        run.save_model(center, result)
    return result
