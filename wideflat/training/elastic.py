"""A training among jobs, one for each replica, that may be killed and come back.

It is the training of one process, step by step, as long as all are there. Every replica has a run directory of its own,
``OUT/replica-A``, and they know each other only through :mod:`wideflat.distributed.elastic`. Started again, a replica
joins the others where they are, from their barycenter; if none is alive, it goes on from its own last state. The center
that is evaluated and saved is the barycenter of the replicas that are alive.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from wideflat.algorithms import ALGORITHMS, having
from wideflat.interruption import stop_requests
from wideflat.presets import Preset
from wideflat.replicas import Replicas
from wideflat.training.company import Alone

if TYPE_CHECKING:
    from wideflat.distributed.elastic import ElasticReplicas
    from wideflat.training.training import Training

__all__ = ["Elastic", "refuse_rigid", "supervise"]

#: Seconds that a replica waits while the others are being set up, before it joins them.
WAIT = 0.5
#: How often in a row a job may fail by itself (no data, a divergence), and seconds of a life after which it is no row.
FAILURES, LONG_LIFE = 3, 600.0


def refuse_rigid(preset: Preset) -> None:
    """Raise if the algorithm cannot go on when replicas are lost."""
    algorithm = ALGORITHMS[preset.algorithm]
    if not algorithm.elastic:
        why = "has more state than its replicas" if algorithm.replicated else "trains one network"
        raise ValueError(
            f"--fault-tolerant is for {having('elastic')}, not for {algorithm.name}, which {why}: leave it out, or "
            "give one of these as --algorithm"
        )


class Elastic(Alone):
    """The replicas that are alive, of which one is here.

    Args:
        index: Which replica this is, 0 to y - 1.
        lighthouse: Address of the lighthouse, by default ``$TORCHFT_LIGHTHOUSE``.
        host: Name or address under which the others reach this machine.
        start_timeout: Seconds to wait for the other replicas at the beginning.
    """

    sees_all = False
    must_meet = True

    def __init__(
        self, index: int, lighthouse: str | None = None, host: str | None = None, start_timeout: float = 60.0
    ) -> None:
        self.index, self.lighthouse, self.host, self.start_timeout = index, lighthouse, host, start_timeout
        self.about = {"replica": index}
        self.words = f" as replica {index}"
        self._stack = contextlib.ExitStack()
        self._num_replicas = self._exchanges = 0
        self._began = False

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, preset: Preset) -> None:
        """Not every algorithm can lose replicas."""
        refuse_rigid(preset)
        if not 0 <= self.index < preset.num_replicas:
            raise ValueError(f"--replica must be at least 0 and below {preset.num_replicas}, got {self.index}")

    # ---- who has what

    def local_replicas(self, num_replicas: int) -> list[int]:
        """The one of this job."""
        self._num_replicas = num_replicas
        return [self.index]

    def group(self, replicas: Replicas) -> ElasticReplicas:
        """Those that are alive."""
        from wideflat.distributed.elastic import ElasticReplicas  # needs torchft

        self.replicas = self._stack.enter_context(
            ElasticReplicas(
                replicas[0],
                index=self.index,
                num_replicas=self._num_replicas,
                lighthouse=self.lighthouse,
                exchanges=self._exchanges,
                host=self.host,
                start_timeout=self.start_timeout,
                say=lambda message: self.say(message),
            )
        )
        return self.replicas

    # ---- what is on disk

    def folder(self, out: str | os.PathLike[str]) -> Path:
        """That of this replica."""
        return Path(out) / f"replica-{self.index}"

    def packed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of this replica, and how often it met the others."""
        return {"rounds": self.replicas.exchanges, "training": state}

    def unpacked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of this replica."""
        self._exchanges = saved["rounds"]
        return saved["training"]

    def about_epoch(self) -> dict[str, Any]:
        """Who was there at the last meeting."""
        return {"alive": list(self.replicas.alive)}

    # ---- coming and going

    def begin(self, training: Training, saved: dict[str, Any] | None) -> None:
        """Meet the others; gamma0 is found together at the beginning, and taken over later."""
        coupling = training.learner.coupling
        assert coupling is not None
        too_early: list[bool] = []

        def progress() -> dict[str, Any]:
            """What one that comes back must know; nothing before the beginning."""
            if not self._began:
                return {}
            return {"coupling": coupling.state_dict(), "focusing": training.learner.focusing[0].state_dict()}

        def catch_up(state: dict[str, Any]) -> None:
            """Go where the others are; in the midst of an iteration its rest is still to come."""
            too_early[:] = [] if state else [True]
            if state:
                coupling.load_state_dict(state["coupling"])
                training.step = coupling.calls - training.iterating
                training.learner.focusing[0].load_state_dict({**state["focusing"], "tau": training.step})

        self.replicas.hand_over(progress, catch_up)
        training.resume(saved)
        self._began = saved is not None
        self._meet(training, saved is None, too_early)
        self._began = True

    def _meet(self, training: Training, first: bool, too_early: list[bool]) -> None:
        """Join the others; if they are just being set up, or if this one is and they are not, wait and join again."""
        from wideflat.distributed.elastic import OutOfStep  # needs torchft

        deadline = time.monotonic() + self.replicas.patience
        while True:
            try:
                if self.replicas.join():
                    if too_early:
                        raise OutOfStep("this replica came back while the others were being set up")
                    self.say(f"joined the others at epoch {training.tau:.2f} of {training.preset.epochs}")
                elif first:
                    training.begin()
                return
            except OutOfStep as reason:
                if time.monotonic() > deadline:
                    raise
                self.say(f"{reason}: it waits and joins them again")
                too_early.clear()
                self.replicas.forget()
                time.sleep(WAIT)


def supervise(
    command: Callable[[int, str], Sequence[str]],
    num_replicas: int,
    lighthouse: str | None = None,
    restarts: int = 100,
    say: Callable[[str], object] = lambda text: None,
    stdout: IO[Any] | None = None,
) -> int:
    """Run all replicas as jobs on this machine, with a lighthouse, and start again those that die.

    Args:
        command: The command line of a replica, given its index and the address of the lighthouse.
        num_replicas: y.
        lighthouse: Address of a lighthouse; by default one is started here.
        restarts: How often jobs are started again, in all.
        say: Where messages go.
        stdout: Where the jobs' standard output goes; by default where that of this process goes.

    Returns:
        The exit code: 0 if all have finished, 130 if they were interrupted, 1 if the restarts are used up.
    """
    from wideflat.distributed.elastic import start_lighthouse  # needs torchft

    server: Any = None if lighthouse else start_lighthouse("127.0.0.1:0")
    address = lighthouse or "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]

    def start(a: int) -> subprocess.Popen[bytes]:  # Ctrl-C reaches them through this process, once
        return subprocess.Popen(command(a, address), stdout=stdout, start_new_session=True)

    jobs = _Jobs(start, restarts, say)
    with stop_requests() as stop:
        try:
            for a in range(num_replicas):
                jobs.start(a)
            while jobs.running:
                time.sleep(0.2)
                if stop:
                    jobs.ask_to_stop()
                jobs.look_after(again=not stop)
            if stop:
                say(f"stopped by {stop[0].name}: {jobs.left()}; start the same command again to go on")
        finally:
            jobs.kill()
            if server is not None:
                server.shutdown()
    return 130 if stop else jobs.code


class _Jobs:
    """The jobs of all replicas, those that die started again."""

    def __init__(
        self, start: Callable[[int], subprocess.Popen[bytes]], restarts: int, say: Callable[[str], object]
    ) -> None:
        self._start, self.restarts, self.say = start, restarts, say
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.code = 0
        self.ended: dict[int, int] = {}
        self._asked = False
        self._born: dict[int, float] = {}
        self._failures: dict[int, int] = {}

    def start(self, a: int) -> None:
        """Start the job of replica ``a``."""
        self.running[a] = self._start(a)
        self._born[a] = time.monotonic()

    def look_after(self, again: bool) -> None:
        """Take out the jobs that have ended; start those again that should not have, if ``again``."""
        for a, job in list(self.running.items()):
            if job.poll() is None:
                continue
            del self.running[a]
            self.ended[a] = job.returncode
            if job.returncode == 0 or not again:
                continue
            if job.returncode in (130, 2) or self.restarts == 0:  # asked to stop; or started with wrong options
                self.code = job.returncode if job.returncode > 0 else 1
                continue
            how = f"signal {-job.returncode}" if job.returncode < 0 else f"exit code {job.returncode}"
            if self._fails_again(a, job.returncode):
                self.code = job.returncode
                self.say(
                    f"replica {a} has failed {FAILURES} times in a row ({how}) and is not started again: it said why"
                )
                continue
            self.restarts -= 1
            self.say(f"replica {a} has died ({how}) and is started again")
            self.start(a)

    def _fails_again(self, a: int, code: int) -> bool:
        """Whether a job has failed by itself, not by a signal, so often that another start would not help."""
        before = self._failures.get(a, 0) if time.monotonic() - self._born[a] < LONG_LIFE else 0
        self._failures[a] = before + 1 if code > 0 else 0
        return self._failures[a] >= FAILURES

    def left(self) -> str:
        """What the jobs have left behind, in words."""
        kinds: dict[str, list[int]] = {}
        for a, code in sorted(self.ended.items()):
            kind = {0: "finished", 130: "saved"}.get(code, "ended as they were saved before")
            kinds.setdefault(kind, []).append(a)
        return ", ".join(f"replicas {', '.join(map(str, all_))} {kind}" for kind, all_ in kinds.items())

    def ask_to_stop(self) -> None:
        """Let all save and end; asked twice, a job would end without saving."""
        if not self._asked:
            for job in self.running.values():
                job.terminate()
        self._asked = True

    def kill(self) -> None:
        """End what is still there."""
        for job in self.running.values():
            job.kill()
            job.wait()
