"""Train a small network and disturb it on the way; run as a script by test_resume.py.

    python killed_training.py kill FOLDER ALGORITHM,... MODE COUNT SEED
    python killed_training.py damage FOLDER ALGORITHM,...
    python killed_training.py long RUN

``kill`` trains undisturbed in FOLDER/ALGORITHM/whole, then again in killed-N beside it with COUNT kills in all,
resuming after each, and compares the two. MODE is ``time`` (SIGKILL from outside after a random time) or ``write`` (the
process kills itself before or after a random system call that changes the disk). ``damage`` truncates the last
checkpoint of a killed run. ``long`` trains for minutes. The first two print a line of JSON with what happened.
"""

import dataclasses
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import noisy
import torch
from torch import nn

from wideflat.data import ImageData
from wideflat.presets import preset
from wideflat.training import Options, Run, Training, train


def network(num_classes: int) -> nn.Module:
    """The network of these runs."""
    return noisy.network(num_classes, channels=8, side=5)


def images() -> ImageData:
    return noisy.images(size=12)


def experiment(algorithm: str, epochs: int = 3):
    base = preset("cifar10-smallconvnet", algorithm)
    cell = dataclasses.replace(base, model="killed_training:network", image_size=12, padding=2, batch_size=16, period=3)
    return cell.with_epochs(epochs)


def run_once(out: Path, algorithm: str, **more) -> Run:
    more = {"tensorboard": False, "progress": False, "checkpoint_minutes": 0.03 / 60, **more}
    return train(experiment(algorithm), out, images(), Options(batch_norm_images=60), snapshots=[2], **more)


def kill_myself_at(moment: int) -> None:
    """SIGKILL this process before (odd moments) or after (even ones) a system call that changes the disk."""
    count = 0

    def at_a_moment() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(original):
        def wrapped(*arguments, **keywords):
            at_a_moment()
            result = original(*arguments, **keywords)
            at_a_moment()
            return result

        return wrapped

    for name in ("fsync", "replace", "truncate", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def in_child(work, tell: int | None = None) -> int:
    """Start ``work`` in a copy of this process; returns its number. The first iteration writes a byte to ``tell``."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        original = Training.iterate

        def iterate(training):
            Training.iterate = original
            if tell is not None:
                os.write(tell, b"x")
            return original(training)

        Training.iterate = iterate
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def compare(whole: Run, killed: Run) -> None:
    assert killed.metrics() == whole.metrics(), "metrics differ"
    assert killed.result() == whole.result(), "results differ"
    for name in ("metrics.jsonl", "model.safetensors", "model.json", "snapshots/epoch-0002.safetensors"):
        assert (whole.path / name).read_bytes() == (killed.path / name).read_bytes(), f"{name} differs"
    last = sorted(path.name for path in (whole.path / "checkpoints").glob("*.safetensors"))[-1]
    assert (whole.path / "checkpoints" / last).read_bytes() == (killed.path / "checkpoints" / last).read_bytes()
    assert not list(killed.path.glob("**/.*.part")), "rubbish is left"


def train_whole(folder: Path, algorithm: str) -> tuple[Run, float]:
    """The undisturbed run, and how long it took from its first iteration on."""
    begun, tell = os.pipe()
    child = in_child(lambda: run_once(folder / "whole", algorithm), tell)
    os.close(tell)  # so that reading ends when the child does
    os.read(begun, 1)
    started = time.monotonic()
    _, status = os.waitpid(child, 0)
    os.close(begun)
    assert status == 0
    return Run.open(folder / "whole"), time.monotonic() - started


def kill(folder: Path, algorithm: str, mode: str, wanted: int, seed: int) -> dict:
    chance = random.Random(seed)
    whole, length = train_whole(folder, algorithm)
    kills = finished = resumed = 0
    while kills < wanted or not finished:
        out = folder / f"killed-{finished}"
        moment = chance.randrange(1, 100)

        def work(out=out, moment=moment, disturbed=kills < wanted):
            if disturbed and mode == "write":
                kill_myself_at(moment)
            run_once(out, algorithm)

        begun, tell = os.pipe()
        child = in_child(work, tell)
        os.close(tell)
        if mode == "time" and kills < wanted:
            if chance.random() < 0.8:  # otherwise perhaps before the first iteration
                os.read(begun, 1)
            time.sleep(chance.uniform(0, length))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(begun)
        if os.WIFSIGNALED(status):
            kills += 1
            continue
        assert os.WEXITSTATUS(status) == 0, "the training failed"
        killed = Run.open(out)
        compare(whole, killed)
        resumed += sum("resumed" in row["event"] for row in killed.metrics("events"))
        finished += 1
    return {"kills": kills, "finished": finished, "resumed": resumed, "seconds": round(length, 2)}


def damage(folder: Path, algorithm: str) -> dict:
    whole, _ = train_whole(folder, algorithm)
    out = folder / "killed"

    def work() -> None:
        def die(training, row) -> None:
            if training.epoch == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        run_once(out, algorithm, on_epoch=die)

    os.waitpid(in_child(work), 0)
    states = sorted((out / "checkpoints").glob("*.safetensors"))
    assert len(states) == 2
    os.truncate(states[-1], states[-1].stat().st_size // 2)
    said: list[str] = []
    run_once(out, algorithm, say=said.append)
    compare(whole, Run.open(out))
    before = int(states[0].stem.split("-")[1])
    steps = whole.metrics()[0]["step"]
    resumed = any(f"at epoch {before / steps:.2f} of" in line for line in said)
    return {"said": said[0], "resumed_before_the_damaged_state": resumed}


def long(out: Path) -> None:
    train(experiment("sgd", epochs=100_000), out, images(), tensorboard=False, progress=False)


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    job, folder, *rest = sys.argv[1:]
    if job == "long":
        long(Path(folder))
        return
    result = {}
    for algorithm in rest[0].split(","):
        place = Path(folder) / algorithm
        if job == "kill":
            result[algorithm] = kill(place, algorithm, rest[1], int(rest[2]), int(rest[3]))
        else:
            result[algorithm] = damage(place, algorithm)
    print(json.dumps(result))


if __name__ == "__main__":
    sys.modules["killed_training"] = sys.modules["__main__"]  # where the model is looked for
    main()
