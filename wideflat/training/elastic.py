"""``wideflat train`` with each replica in a job that may be killed and come back.

The training is that of :mod:`wideflat.training.training`, step by step. Every replica has a run directory of its own,
``OUT/replica-A``, and they know each other only through :mod:`wideflat.distributed.elastic`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wideflat.data import ImageData
from wideflat.presets import Preset
from wideflat.progress import Progress
from wideflat.training.algorithms import Place
from wideflat.training.runs import Run
from wideflat.training.training import Interrupted, Options, Training, _finish, _stop_requests, _text, run_held

__all__ = ["supervise", "train_with_losses"]

#: Iterations between two updates of the progress.
SHOW_EVERY = 10


def train_with_losses(
    experiment: Preset,
    out: str | os.PathLike[str],
    data: ImageData,
    options: Options | None = None,
    *,
    index: int,
    lighthouse: str | None = None,
    host: str | None = None,
    device: torch.device | str = "cpu",
    checkpoint_minutes: float = 5.0,
    progress: bool = True,
    start_timeout: float = 60.0,
    say: Callable[[str], object] = lambda text: None,
) -> Run:
    """Train replica ``index`` in a job of its own; the others may be killed and come back at any time, and so may this.

    Its run directory is ``out/replica-INDEX``. Started again, it joins the others where they are, from their
    barycenter; if none is alive, it goes on from its own last state. The center that is evaluated and saved is the
    barycenter of the replicas that are alive.

    Args:
        experiment: With Replicated-SGD (rsgd, rsgdxy).
        out: Folder of the run directories.
        data: The images.
        options: How to compute.
        index: Which replica this is, 0 to y - 1.
        lighthouse: Address of the lighthouse, by default ``$TORCHFT_LIGHTHOUSE``.
        host: Name or address under which the others reach this machine.
        device: Where.
        checkpoint_minutes: A state is saved after every epoch, and after so many minutes within one.
        progress: Show progress.
        start_timeout: Seconds to wait for the other replicas at the beginning.
        say: Where messages go.
    """
    from wideflat.distributed.elastic import LivingReplicas

    options = options or Options()
    if experiment.algorithm not in ("rsgd", "rsgdxy"):
        raise ValueError(
            f"training that survives the loss of replicas is for rsgd and rsgdxy, not for {experiment.algorithm}"
        )
    with contextlib.ExitStack() as stack:
        run, tell = stack.enter_context(run_held(experiment, Path(out) / f"replica-{index}", data, options, say))
        if run.result() is not None:
            return run
        saved = run.restore(tell)

        def make_group(network: nn.Module) -> LivingReplicas:
            return stack.enter_context(
                LivingReplicas(
                    network,
                    index=index,
                    num_replicas=experiment.num_replicas,
                    lighthouse=lighthouse,
                    rounds=0 if saved is None else saved["rounds"],
                    host=host,
                    start_timeout=start_timeout,
                    say=tell,
                )
            )

        training = _LivingTraining(experiment, data, options, torch.device(device), Place(index, make_group), saved)
        group = training.group
        if saved is not None:
            tell(f"restored {run.path}")
        if training.came_back:
            tell(f"joined the others at epoch {training.tau:.2f} of {experiment.epochs}")
        stop = stack.enter_context(_stop_requests())
        bar = stack.enter_context(Progress(f"replica {index}", training.total_steps, progress, before=training.step))
        last_save = time.monotonic()

        def save() -> None:
            run.save_checkpoint(training.step, {"rounds": group.rounds, "training": training.state_dict()})

        while training.step < training.total_steps:
            loss = training.iterate()
            if training.at_epoch_end:
                training.check()
                row = training.close_epoch()
                run.append("metrics", {**row, "alive": list(group.alive)})
                say(f"epoch {row['epoch']}/{experiment.epochs}  {_text(row)}")
            if training.at_epoch_end or stop or time.monotonic() - last_save > 60 * checkpoint_minutes:
                training.check()
                save()
                last_save = time.monotonic()
            if training.step % SHOW_EVERY == 0:
                bar.update(training.step, loss=float(loss))
            if stop and training.step < training.total_steps:
                raise Interrupted(
                    f"stopped by {stop[0].name} at epoch {training.tau:.2f} of {experiment.epochs}; {run.path} is "
                    "saved: start the same command again to go on"
                )
        result = _finish(run, training)
        tell(f"finished {run.path}: test error of the barycenter {100 * result['test_error']:.2f} %")
        return run


class _LivingTraining(Training):
    """The training of one replica among those that are alive.

    Args:
        saved: The last state of this replica, if it was trained before: taken, unless the others are further.
    """

    def __init__(
        self,
        experiment: Preset,
        data: ImageData,
        options: Options,
        device: torch.device,
        place: Place,
        saved: dict[str, Any] | None,
    ) -> None:
        self._saved = saved
        self._began = self._iterating = self._came_too_early = False
        super().__init__(experiment, data, options, device, place)

    def _start(self) -> None:
        """Meet the others; gamma0 is found together at the beginning, and taken over later."""
        learner, x = self.learner, self.experiment
        assert learner.coupling is not None
        group: Any = learner.coupling.group
        self.group = group
        group.hand_over(self._progress, self._catch_up)
        learner._focus(learner.coupling, 1.0, x.gamma_factor, x.focusing, self.total_steps)  # gamma0 comes below
        if self._saved is not None:
            self.load_state_dict(self._saved["training"])
        self.came_back = group.join()
        if self._came_too_early:
            raise RuntimeError("this replica came back while the others were being set up: start it again")
        if not self.came_back and self._saved is None:
            learner.focusing.clear()
            super()._start()
        self._began = True

    def _progress(self) -> dict[str, Any]:
        """What one that comes back must know."""
        if not self._began:
            return {}
        assert self.learner.coupling is not None
        return {"coupling": self.learner.coupling.state_dict(), "focusing": self.learner.focusing[0].state_dict()}

    def _catch_up(self, state: dict[str, Any]) -> None:
        """Go where the others are; in the midst of an iteration its rest is still to come."""
        self._came_too_early = not state
        if self._came_too_early:
            return
        coupling, focusing = self.learner.coupling, self.learner.focusing[0]
        assert coupling is not None
        coupling.load_state_dict(state["coupling"])
        self.step = coupling.calls - self._iterating
        focusing.load_state_dict({**state["focusing"], "tau": self.step})

    def iterate(self) -> torch.Tensor:
        """One iteration, at whose coupling this replica may find that the others are further."""
        self._iterating = True
        try:
            return super().iterate()
        finally:
            self._iterating = False


def supervise(
    command: Callable[[int, str], Sequence[str]],
    num_replicas: int,
    lighthouse: str | None = None,
    restarts: int = 100,
    say: Callable[[str], object] = lambda text: None,
) -> int:
    """Run all replicas as jobs on this machine, with a lighthouse, and start again those that die.

    Args:
        command: The command line of a replica, given its index and the address of the lighthouse.
        num_replicas: y.
        lighthouse: Address of a lighthouse; by default one is started here.
        restarts: How often jobs are started again, in all.
        say: Where messages go.

    Returns:
        The exit code: 0 if all have finished, 130 if they were interrupted, 1 if the restarts are used up.
    """
    from wideflat.distributed.elastic import start_lighthouse

    server: Any = None if lighthouse else start_lighthouse("127.0.0.1:0")
    address = lighthouse or "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]
    jobs: dict[int, subprocess.Popen[bytes]] = {}
    code = 0
    with _stop_requests() as stop:
        try:
            for a in range(num_replicas):
                jobs[a] = subprocess.Popen(command(a, address))
            while jobs and not (stop and all(job.poll() is not None for job in jobs.values())):
                time.sleep(0.2)
                for a, job in list(jobs.items()):
                    if job.poll() is None:
                        continue
                    del jobs[a]
                    if job.returncode == 0 or stop:
                        continue
                    if job.returncode in (130, 2) or restarts == 0:  # asked to stop; or started with wrong options
                        code = job.returncode if job.returncode > 0 else 1
                        continue
                    restarts -= 1
                    how = f"signal {-job.returncode}" if job.returncode < 0 else f"exit code {job.returncode}"
                    say(f"replica {a} has died ({how}) and is started again")
                    jobs[a] = subprocess.Popen(command(a, address))
                if stop:
                    for job in jobs.values():
                        job.terminate()
        finally:
            for job in jobs.values():
                job.kill()
                job.wait()
            if server is not None:
                server.shutdown()
    return 130 if stop else code
