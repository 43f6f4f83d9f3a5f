"""Train with losses of replicas for a long time: kills, stops, a lighthouse that goes, and partitions.

    make soak [MINUTES=60] [SEED=0]        python tools/soak.py --minutes 60 --seed 0 --replicas 3

Three jobs train one network together (`wideflat.training.elastic`). Every few seconds something that a seed chooses
happens to one of them: SIGKILL, after which it is started again; SIGSTOP for some seconds; its network is cut off for
some seconds; or the lighthouse is killed and started again. Nothing but these processes is ever a target: where root
allows it, each job has a network namespace of its own, joined by a bridge in another one, and it is the link in there
that is cut. Elsewhere they talk over loopback, and nothing is cut.

At the end all must have finished by themselves; every file must be whole; the epochs in each table must be without a
gap; no exit code but those of our kills; no process left. The memory of each job is sampled, and its slope reported.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training import Options, Run, train_in
from wideflat.training.elastic import Elastic
from wideflat.training.state_files import load_state

MARK = "WIDEFLAT_SOAK"
#: Seconds between two disturbances; of a stop or a partition; between two looks at the memory.
EVERY, LASTING, LOOK = (15.0, 45.0), (1.0, 10.0), 2.0
#: Seconds that the jobs have to finish when the time is up; of a life that has a slope; of its beginning without one.
PATIENCE, LONG, SETTLING = 180.0, 600.0, 300.0


# ------------------------------------------------------------------------------------------------------------ one job


def images(count: int = 96) -> ImageData:
    """Stripes whose place tells the class."""
    targets = torch.arange(count) % 10
    pixels = torch.randint(60, (count, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    pixels[torch.arange(count), targets % 3, targets] += 150
    part = ImageSplit(pixels.to(torch.uint8), targets)
    return ImageData.of("stripes", tuple("0123456789"), part, part)


def job(out: str, index: int, replicas: int, lighthouse: str, host: str, end: float) -> None:
    """One replica, until the time is up."""
    torch.set_num_threads(1)
    cell = preset("cifar10-smallconvnet", "rsgd")
    cell = dataclasses.replace(cell, image_size=16, batch_size=32, period=5, num_replicas=replicas, gamma0=0.05)
    with Elastic(index, lighthouse, host) as company:
        train_in(
            company, cell.with_epochs(10**6), out, images(), Options(channels_last=False, evaluate_every=50),
            tensorboard=False, progress=False, checkpoint_minutes=0.05, until=lambda row: time.time() > end,
        )  # fmt: skip
    os._exit(0)  # torchft's servers would be waited for


# --------------------------------------------------------------------------------------------------------- the network


class Loopback:
    """All on this machine's loopback; nothing can be cut."""

    cuts = False

    def inside(self, place: int | None) -> list[str]:
        """What a command line begins with, to run at a place (None: where the lighthouse is)."""
        return []

    def address(self, place: int | None) -> str:
        """Of a place."""
        return "127.0.0.1"

    device = "lo"

    def cut(self, place: int, off: bool) -> None:
        """Cut a place off from all others, or join it again."""


class Namespaces(Loopback):
    """A network namespace for each job, and one with a bridge, where the lighthouse is; they go at the end."""

    cuts = True
    device = "eth0"

    def __init__(self, replicas: int) -> None:
        self.names = {None: f"wf{os.getpid()}hub", **{a: f"wf{os.getpid()}r{a}" for a in range(replicas)}}

    def __enter__(self) -> Namespaces:
        for name in self.names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        hub = self.names[None]
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "addr", "add", "10.77.0.1/24", "dev", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for a in range(len(self.names) - 1):
            name = self.names[a]
            _ip("-n", hub, "link", "add", f"v{a}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", hub, "link", "set", f"v{a}", "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(a)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def inside(self, place: int | None) -> list[str]:
        """In the namespace of a place."""
        return ["ip", "netns", "exec", self.names[place]]

    def address(self, place: int | None) -> str:
        """Of a place, on the bridge."""
        return "10.77.0.1" if place is None else f"10.77.0.{10 + place}"

    def cut(self, place: int, off: bool) -> None:
        """Take the link of a place down, or up."""
        _ip("-n", self.names[None], "link", "set", f"v{place}", "down" if off else "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def network(replicas: int) -> Iterator[Loopback]:
    """Namespaces where root allows it, otherwise loopback."""
    made = Loopback()
    namespaces = Namespaces(replicas)
    with contextlib.ExitStack() as stack:
        stack.callback(namespaces.__exit__)
        try:
            made = namespaces.__enter__()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no network namespaces ({error}): nothing is cut off", flush=True)
        yield made


# ------------------------------------------------------------------------------------------------------------ the soak

LIGHTHOUSE = """
import sys, time
from wideflat.distributed.elastic import start_lighthouse
server = start_lighthouse(sys.argv[1], heartbeat_timeout=2.0, join_timeout=20.0)
time.sleep(1e6)
"""


class Soak:
    """The jobs, what happens to them, and what is seen of it."""

    def __init__(self, out: Path, replicas: int, minutes: float, seed: int, net: Loopback) -> None:
        self.out, self.replicas, self.net = out, replicas, net
        self.chance = random.Random(seed)
        self.begun = time.time()
        self.end = self.begun + 60 * minutes
        self.port = 20000 + os.getpid() % 10000
        self.jobs: dict[int, subprocess.Popen[bytes]] = {}
        self.killed: set[int] = set()  # process numbers
        self.happened: dict[str, int] = {}
        self.faults: list[str] = []
        self.memory: dict[int, list[tuple[float, float]]] = {}
        self.later: list[tuple[float, str, int]] = []
        self.spared = self.chance.randrange(replicas)  # never killed, so that there is a memory to look at for long

    def start(self, place: int | None) -> subprocess.Popen[bytes]:
        """Start a job, or the lighthouse, at its place."""
        address = f"{self.net.address(None)}:{self.port}"
        if place is None:
            command = ["-c", LIGHTHOUSE, address]
        else:
            words = (self.out, place, self.replicas, f"http://{address}", self.net.address(place), self.end)
            command = [__file__, "--job", *map(str, words)]
        settings = {MARK: str(os.getpid()), "GLOO_SOCKET_IFNAME": self.net.device, "OMP_NUM_THREADS": "1"}
        with open(self.out / f"log-{'lighthouse' if place is None else place}", "ab") as log:
            return subprocess.Popen(
                [*self.net.inside(place), sys.executable, *command],
                stdout=log,
                stderr=log,
                env={**os.environ, **settings},
            )

    def run(self) -> None:
        """Until the time is up and all have ended."""
        self.lighthouse = self.start(None)
        for a in range(self.replicas):
            self.jobs[a] = self.start(a)
        next_time = self.begun + 30
        try:
            while self.jobs and time.time() < self.end + PATIENCE:
                time.sleep(LOOK)
                self.look_after()
                if next_time < time.time() < self.end - 20:
                    self.disturb()
                    next_time = time.time() + self.chance.uniform(*EVERY)
            self.faults += [f"replica {a} has not ended {PATIENCE:g} seconds after the end" for a in self.jobs]
        finally:
            for process in [*self.jobs.values(), self.lighthouse]:
                process.kill()
                process.wait()

    def look_after(self) -> None:
        """Memory; what is due; jobs that have ended."""
        for due, what, a in [each for each in self.later if each[0] < time.time() or time.time() > self.end - 10]:
            self.later.remove((due, what, a))
            if what == "continue" and a in self.jobs:
                self.jobs[a].send_signal(signal.SIGCONT)
            if what == "join":
                self.net.cut(a, off=False)
        for a, process in list(self.jobs.items()):
            code = process.poll()
            if code is None:
                self.sample(process.pid)
                continue
            del self.jobs[a]
            if code == 0:
                continue
            if process.pid not in self.killed:
                self.faults.append(f"replica {a} ended with {code}: {self.last_words(a)}")
            self.jobs[a] = self.start(a)

    def sample(self, pid: int) -> None:
        """How much memory a job has for itself; what is mapped from files comes and goes with what others do."""
        with contextlib.suppress(OSError):
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            pages = resident - shared
            if not resident:  # it has ended
                return
            self.memory.setdefault(pid, []).append((time.time(), pages * os.sysconf("SC_PAGESIZE") / 1e6))

    def disturb(self) -> None:
        """Let something happen to somebody."""
        kinds = ["kill", "kill", "stop", "lighthouse"] + ["cut"] * 2 * self.net.cuts
        what, a = self.chance.choice(kinds), self.chance.choice(sorted(self.jobs))
        if what == "kill" and a == self.spared:
            what = "stop"
        until = time.time() + self.chance.uniform(*LASTING)
        self.happened[what] = self.happened.get(what, 0) + 1
        if what == "kill":
            self.killed.add(self.jobs[a].pid)
            self.jobs[a].kill()
        elif what == "stop":
            self.jobs[a].send_signal(signal.SIGSTOP)
            self.later.append((until, "continue", a))
        elif what == "cut":
            self.net.cut(a, off=True)
            self.later.append((until, "join", a))
        else:
            self.lighthouse.kill()
            self.lighthouse.wait()
            self.lighthouse = self.start(None)

    def last_words(self, a: int) -> str:
        """What a job has said last."""
        return (self.out / f"log-{a}").read_text(errors="replace")[-600:]

    # ---- afterwards

    def check(self) -> list[int]:
        """Look at the runs; the epochs that each has reached."""
        reached = []
        for a in range(self.replicas):
            try:
                run = Run.open(self.out / f"replica-{a}")
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # a damaged line
                    rows = run.metrics()
                reached.append(rows[-1]["epoch"])
                if run.result() is None:
                    self.faults.append(f"replica {a} has no result")
                elif not all(bool(torch.isfinite(w).all()) for w in load_state(run.path / "model").values()):
                    self.faults.append(f"replica {a} has weights that are not finite")
                epochs = [row["epoch"] for row in rows]
                if epochs != sorted(set(epochs)):
                    self.faults.append(f"the epochs of replica {a} are not in order")
                if rubbish := list(run.path.glob("**/.*.part")):
                    self.faults.append(f"replica {a} leaves {len(rubbish)} unfinished files")
            except Exception as error:
                self.faults.append(f"replica {a}: {error!r}")
        left = [pid for pid in marked(str(os.getpid())) if pid != os.getpid()]
        self.faults += [f"process {pid} is left behind" for pid in left]
        return reached

    def slopes(self) -> list[tuple[float, float, float]]:
        """Of each long life without its first minutes (imports, caches): minutes, MB at the end, MB an hour."""
        found = []
        for samples in self.memory.values():
            t, m = np.array(samples).T
            keep = t > t[0] + SETTLING
            if t[-1] - t[0] > LONG:
                slope = np.polyfit(t[keep] - t[0], m[keep], 1)[0] * 3600
                found.append((float(t[-1] - t[0]) / 60, float(m[-1]), float(slope)))
        return found


def marked(mark: str) -> list[int]:
    """Processes that this soak has started, by their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def main() -> int:
    """A job, or the soak; the exit code is 1 if there was a fault."""
    if sys.argv[1:2] == ["--job"]:
        out, index, replicas, lighthouse, host, end = sys.argv[2:]
        job(out, int(index), int(replicas), lighthouse, host, float(end))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then, either
    with tempfile.TemporaryDirectory() as folder, network(arguments.replicas) as net:
        soak = Soak(Path(folder), arguments.replicas, arguments.minutes, arguments.seed, net)
        soak.run()
        reached, slopes = soak.check(), soak.slopes()
    happened = ", ".join(f"{count} x {what}" for what, count in sorted(soak.happened.items()))
    print(f"{arguments.minutes:g} minutes, seed {arguments.seed}, {arguments.replicas} replicas: {happened}")
    print(f"epochs reached: {reached}")
    for length, megabytes, slope in sorted(slopes)[-3:]:
        print(f"memory of a life of {length:.1f} minutes: {megabytes:.0f} MB at its end, {slope:+.1f} MB an hour")
    for fault in soak.faults:
        print(f"FAULT: {fault}")
    print(f"{len(soak.faults)} faults")
    return bool(soak.faults)


if __name__ == "__main__":
    sys.exit(main())
