"""A schedule of faults, drawn from a seed, around all functions that write to the disk.

Every call that changes the disk, and every iteration, is a *moment*. At a moment a process can be killed, before or
after the call; what it writes can be torn; the disk can be full or fail to synchronise; a rename that was not yet
synchronised can be lost; the clock can jump; the process can stop for a while.
"""

import builtins
import dataclasses
import errno
import os
import random
import signal
import tempfile
import time

#: What can happen at each kind of moment. After those of MILD the process goes on.
MILD = ("stop", "clock")
KINDS = {
    "write": ("kill before", "torn", "full", *MILD),
    "fsync": ("kill before", "torn", "kill after", "failing", *MILD),
    "replace": ("kill before", "kill after", "lost", "full", *MILD),
    "other": ("kill before", "kill after", *MILD),
    "iterate": ("kill before", *MILD),
}
#: Seconds that a process stops for; what a clock jumps by, in seconds.
STOP, JUMP = 0.3, 1e6
#: Writes to one file of which one is a moment.
PIECES = 500


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one process.

    Args:
        process: Which of its company.
        moment: The number of the moment.
        choice: Which of the kinds that this moment can have; a number, by its remainder.
        part: How much of what is written gets through, 0 to 1.
    """

    process: int
    moment: int
    choice: int
    part: float


def draw(seed, company, processes, moments):
    """The faults of one training: a list for each of its lives, of which the last one has none."""
    chance = random.Random(f"{seed} {company}")
    lives = []
    for _ in range(chance.choice([1, 2, 2, 3, 4])):
        moment = sorted(chance.randrange(1, max(2, moments)) for _ in range(chance.choice([1, 1, 2])))
        process = chance.randrange(processes)
        lives.append([Fault(process, m, chance.randrange(1000), chance.random()) for m in moment])
    return [*lives, []]


class Disk:
    """The functions that write to the disk, with faults; counts the moments.

    Args:
        faults: Of this process, in this life.
        folder: Only what is below it is disturbed.
        mild: Only faults after which the process goes on.
        say: Where it is said what happens.
    """

    def __init__(self, faults, folder, mild=False, say=lambda message: None):
        self.faults = {fault.moment: fault for fault in faults}
        self.folder, self.mild, self.say = str(folder), mild, say
        self.moments = 0
        self.synchronised = {}  # bytes of a file, by its number, that a loss of power leaves
        self.lost = None  # what undoes the last rename
        self.real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink", "truncate", "mkdir")}

    def install(self):
        """Put the faults into ``os``, ``open`` and ``tempfile``."""
        os.fsync = self.fsync
        os.replace = self.replace
        for name in ("unlink", "truncate", "mkdir"):
            setattr(os, name, self.other(self.real[name]))
        tempfile.mkstemp = self.other(tempfile.mkstemp, keyword="dir")
        opened = builtins.open

        def open_(file, mode="r", *arguments, **keywords):
            made = opened(file, mode, *arguments, **keywords)
            ours = isinstance(file, int) or str(file).startswith(self.folder)
            return File(made, self) if ours and set(mode) & set("wa+") else made

        builtins.open = open_

    # ---- the calls

    def write(self, file, content):
        """Write all, a part, or nothing."""
        fault = self.meet("write")
        if fault is not None:
            kind, part = fault
            file.write(content[: int(part * len(content))])
            file.flush()
            if kind == "torn":
                self.die()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file.write(content)

    def fsync(self, descriptor):
        """Synchronise, or lose what was not."""
        status = os.fstat(descriptor)
        fault = self.meet("fsync")
        if fault is not None:
            kind, part = fault
            if kind == "failing":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if kind == "torn":
                kept = self.synchronised.get(status.st_ino, 0)
                if status.st_size > kept and not os.path.isdir(f"/proc/self/fd/{descriptor}"):
                    os.ftruncate(descriptor, kept + int(part * (status.st_size - kept)))
                self.die()
        self.real["fsync"](descriptor)
        self.synchronised[status.st_ino] = status.st_size
        self.after(fault)

    def replace(self, source, target):
        """Rename, which is lost if the power goes before the folder is synchronised."""
        fault = self.meet("replace")
        if fault is not None and fault[0] == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before = None
        if fault is not None and fault[0] == "lost" and os.path.exists(target):
            with open(target, "rb") as file:
                before = file.read()
        self.real["replace"](source, target)
        if fault is not None and fault[0] == "lost":
            self.lost = (target, before)
        self.after(fault)

    def other(self, function, keyword=None):
        """A call that is done or not."""

        def call(*arguments, **keywords):
            path = keywords.get(keyword) if keyword else arguments[0]
            if not str(path).startswith(self.folder):
                return function(*arguments, **keywords)
            fault = self.meet("other")
            result = function(*arguments, **keywords)
            self.after(fault)
            return result

        return call

    # ---- what happens

    def meet(self, call):
        """A moment before a call; what is to happen within it, if anything."""
        if self.lost is not None:
            target, before = self.lost
            self.real["unlink"](target)
            if before is not None:
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT)
                os.write(descriptor, before)
            self.die()
        self.moments += 1
        fault = self.faults.get(self.moments)
        if fault is None:
            return None
        kinds = MILD if self.mild else KINDS[call]
        kind = kinds[fault.choice % len(kinds)]
        self.say(f"{kind} at moment {self.moments} ({call})")
        if kind == "kill before":
            self.die()
        if kind == "stop":
            stop_for_a_while(STOP)
        if kind == "clock":
            jump(JUMP if fault.part < 0.5 else -JUMP)
        return None if kind in MILD else (kind, fault.part)

    def after(self, fault):
        """The moment after a call."""
        if fault is not None and fault[0] == "kill after":
            self.die()

    def die(self):
        """As by a loss of power."""
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


class File:
    """An open file whose writes are moments: the first, and of the others one in PIECES, since JSON comes in crumbs."""

    def __init__(self, file, disk):
        self._file, self._disk, self._writes = file, disk, 0

    def write(self, content):
        self._writes += 1
        if self._writes % PIECES != 1:
            return self._file.write(content)
        return self._disk.write(self._file, content)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __iter__(self):
        return iter(self._file)


def stop_for_a_while(seconds):
    """Stop this process, as by SIGSTOP; another one wakes it up."""
    me = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(me, signal.SIGCONT)
        os._exit(0)
    os.kill(me, signal.SIGSTOP)


def jump(seconds):
    """The clock on the wall jumps, to either side; the one that cannot go back jumps ahead."""
    wall, steady = time.time, time.monotonic
    time.time = lambda: wall() + seconds
    time.monotonic = lambda: steady() + abs(seconds)
