"""One training under a schedule of faults, in any company, compared with the undisturbed one.

    python faulty_training.py FOLDER COMPANY ALGORITHM SEED [SEED ...]

COMPANY is ``alone``, ``ranks`` (two of them), or ``elastic`` (two jobs, and a lighthouse that is lost and comes back).
Every seed is a schedule (faults.py), and each ends bit for bit as the undisturbed training does. Among jobs that come
and go only those of even seeds do, in which no process is lost: a job that was lost begins again at the barycenter, as
it should; of these it is asked that they end, with whole files. Prints a line for each schedule; the exit code is 1 if
one was at fault.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from faults import Disk, draw
from killed_training import images

from wideflat.algorithms import ALGORITHMS
from wideflat.presets import preset
from wideflat.training import Options, Run, Training, ranks, train_in
from wideflat.training.company import Alone
from wideflat.training.elastic import Elastic
from wideflat.training.state_files import load_state

#: Seconds for all lives of a training, and those that the others have to end by themselves when one has died.
PATIENCE, GRACE = 180.0, 5.0
PROCESSES = {"alone": 1, "ranks": 2, "elastic": 2}
LIGHTHOUSE = """
import sys, time
from wideflat.distributed.elastic import start_lighthouse
server = start_lighthouse(f"127.0.0.1:{sys.argv[1]}", heartbeat_timeout=float(sys.argv[2]), join_timeout=60.0)
print("here", flush=True)
time.sleep(3600)
"""


class Fault(AssertionError):
    """A schedule did not end as it should."""


def experiment(name):
    """Two epochs of five mini-batches (times L = 2), two replicas where there are some."""
    algorithm = ALGORITHMS[name]
    settings = {"image_size": 12, "padding": 2, "batch_size": 16, "period": 2, "gamma0": 0.1}
    settings |= {"num_replicas": 2} if algorithm.replicated else {}
    settings |= {"inner_steps": 2} if algorithm.inner else {}
    cell = preset("cifar10-smallconvnet", name)
    return dataclasses.replace(cell, model="killed_training:network", **settings).with_epochs(2)


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Trial:
    """One training in its company, through all its lives.

    Args:
        out: The run directory.
        company: Its name.
        algorithm: What to train.
        lives: The faults of each life.
        mild: Only faults after which a process goes on.
        port: Of the lighthouse.
    """

    def __init__(self, out, company, algorithm, lives, mild=False, port=None):
        self.out, self.company, self.algorithm, self.lives, self.mild = out, company, algorithm, lives, mild
        self.port = port
        self.log = open(f"{out}.log", "ab")  # noqa: SIM115 # open as long as the training lives
        self.deadline = time.monotonic() + PATIENCE

    # ---- in a process of its own

    def start(self, process, faults, port):
        """Start a process for one life; its number."""
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            for descriptor in (1, 2):
                os.dup2(self.log.fileno(), descriptor)
            disk = Disk([fault for fault in faults if fault.process == process], self.out, self.mild, self.say)
            self.live(disk, process, port)
            descriptor = os.open(f"{self.out}.moments-{process}", os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, str(disk.moments).encode())
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(code)

    def say(self, message):
        os.write(2, f"== {message}\n".encode())

    def live(self, disk, process, port):
        """Train, with faults."""
        iterate = Training.iterate

        def counted(training):
            disk.meet("iterate")
            return iterate(training)

        Training.iterate = counted
        disk.install()
        how = {"checkpoint_minutes": -1.0, "snapshots": [1], "tensorboard": False, "progress": False}
        with self.company_of(process, port) as company:
            train_in(company, experiment(self.algorithm), self.out, images(), Options(batch_norm_images=60), **how)

    def company_of(self, process, port):
        """Who trains with a process."""
        if self.company == "alone":
            return Alone()
        if self.company == "elastic":
            return Elastic(process, f"http://127.0.0.1:{self.port}", "127.0.0.1", start_timeout=30.0)
        os.environ.update(RANK=str(process), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        ranks.AGREE_EVERY = 2
        replicas = experiment(self.algorithm).num_replicas
        return ranks.Ranks.of_torchrun(replicas, torch.device("cpu"), timeout=60.0)

    # ---- from outside

    def together(self):
        """All processes begin and end together, as torchrun has it; again until a life has ended well."""
        for faults in self.lives:
            port = free_port()
            children = [self.start(process, faults, port) for process in range(PROCESSES[self.company])]
            codes = self.wait_for(children)
            if not any(codes):
                return
            if not faults:
                raise Fault(f"a life without faults ended with {codes}:\n{self.told()}")
        raise Fault("no life ended well")

    def wait_for(self, children):
        """The exit codes; when one has died the others are asked to end, and then ended."""
        codes, died = dict.fromkeys(children), None
        while None in codes.values():
            for child in [child for child, code in codes.items() if code is None]:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                    died = died or (time.monotonic() if codes[child] else None)
            living = [child for child, code in codes.items() if code is None]
            if time.monotonic() > self.deadline:
                for child in living:
                    os.kill(child, signal.SIGKILL)
                raise Fault(f"no end after {PATIENCE:g} seconds:\n{self.told()}")
            for child in living:
                if died is not None and time.monotonic() > died + GRACE:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        return list(codes.values())

    def one_by_one(self, lighthouse):
        """Jobs, each of which begins again when it has died; the lighthouse is lost and comes back once."""
        lives = {process: iter(self.lives) for process in range(2)}
        jobs = {process: self.start(process, next(lives[process]), None) for process in lives}
        lost = time.monotonic() + 1.0
        while jobs:
            for process, child in list(jobs.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done and status == 0:
                    del jobs[process]
                elif done:
                    jobs[process] = self.start(process, next(lives[process], []), None)
            if lost is not None and time.monotonic() > lost:
                lighthouse.come_back()
                lost = None
            if time.monotonic() > self.deadline:
                for child in jobs.values():
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                raise Fault(f"no end after {PATIENCE:g} seconds:\n{self.told()}")
            time.sleep(0.01)

    def told(self):
        return Path(f"{self.out}.log").read_text(errors="replace")[-3000:]

    def moments(self):
        """How many the first process had."""
        return int(Path(f"{self.out}.moments-0").read_text())


class Lighthouse:
    """In a process of its own, so that it can be lost; jobs that stop for a while are waited for."""

    def __init__(self, heartbeat=10.0):
        self.port, self.heartbeat = free_port(), heartbeat
        self.start()

    def start(self):
        command = [sys.executable, "-c", LIGHTHOUSE, str(self.port), str(self.heartbeat)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"here\n"

    def come_back(self):
        self.end()
        self.start()

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def compare(whole, other):
    """Two run directories hold the same training, byte for byte."""
    for run in whole, other:
        if run.result() is None:
            raise Fault(f"{run.path} has no result")
    last = sorted(path.name for path in (whole.path / "checkpoints").glob("*.safetensors"))[-1]
    for name in ("metrics.jsonl", "model.safetensors", "model.json", "snapshots/epoch-0001.safetensors",
                 f"checkpoints/{last}"):  # fmt: skip
        if (whole.path / name).read_bytes() != (other.path / name).read_bytes():
            raise Fault(f"{name} differs from the undisturbed run")
    must_be_whole(other)


def must_be_whole(run):
    """Every file of a run can be read, and nothing lies about."""
    if run.result() is None:
        raise Fault(f"{run.path} has no result")
    if not all(bool(torch.isfinite(value).all()) for value in load_state(run.path / "model").values()):
        raise Fault("the weights are not finite")
    for path in (run.path / "checkpoints").glob("*.json"):
        load_state(path.with_suffix(""))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a damaged line
        run.metrics()
    if rubbish := list(run.path.glob("**/.*.part")):
        raise Fault(f"rubbish is left: {rubbish}")


def runs_of(out, company):
    return [Run.open(out / f"replica-{a}" if company == "elastic" else out) for a in range(PROCESSES[company])]


def try_schedules(folder, company, algorithm, seeds):
    """Every schedule; what was at fault, by its seed."""
    lighthouse = Lighthouse() if company == "elastic" else None
    port = lighthouse and lighthouse.port

    def trained(name, lives, mild=False):
        trial = Trial(folder / name, company, algorithm, lives, mild, port)
        if lighthouse is None:
            trial.together()
        else:
            trial.one_by_one(lighthouse)
        return trial

    faults = {}
    try:
        moments = trained("whole", [[]]).moments()
        for seed in seeds:
            lives = draw(seed, company, PROCESSES[company], moments)
            mild = company == "elastic" and seed % 2 == 0
            try:
                trained(f"seed-{seed}", lives, mild)
                for whole, run in zip(
                    runs_of(folder / "whole", company), runs_of(folder / f"seed-{seed}", company), strict=True
                ):
                    compare(whole, run) if company != "elastic" or mild else must_be_whole(run)
                print(f"{company} {algorithm} seed {seed}: {sum(map(len, lives))} faults, as undisturbed", flush=True)
            except Fault as fault:
                faults[seed] = str(fault)
                again = f"python tests/training/faulty_training.py FOLDER {company} {algorithm} {seed}"
                print(f"{company} {algorithm} seed {seed}: {fault}\nTo repeat it: {again}", flush=True)
    finally:
        if lighthouse is not None:
            lighthouse.end()
    return faults


def main(folder, company, algorithm, *seeds):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    Path(folder).mkdir(parents=True, exist_ok=True)
    return 1 if try_schedules(Path(folder).resolve(), company, algorithm, [int(seed) for seed in seeds]) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
