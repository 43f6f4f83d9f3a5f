"""Trains stripes with replicas, as a job of its own or on the ranks of torchrun, for the tests beside it.

Usage: python training_job.py OUT [INDEX LIGHTHOUSE]
"""

import atexit
import dataclasses
import os
import sys

import torch

from wideflat.data import ImageData, ImageSplit
from wideflat.presets import preset
from wideflat.training import Interrupted, Options, train, train_in
from wideflat.training.company import on_torchrun
from wideflat.training.elastic import Elastic
from wideflat.training.ranks import Ranks


def images(count=96):
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(count) % 10
    pixels = torch.randint(60, (count, 3, 32, 32), generator=generator)
    pixels[torch.arange(count), targets % 3, 3 * targets] += 150  # something to learn
    part = ImageSplit(pixels.to(torch.uint8), targets)
    return ImageData.of("stripes", tuple("0123456789"), part, part)


def experiment(algorithm, epochs=2, **changes):
    changes = {"batch_size": 32, "period": 2, "num_replicas": 2, "lr": 0.02, **changes}
    if algorithm == "parle":
        changes["inner_steps"] = 2
    return dataclasses.replace(preset("cifar10-smallconvnet", algorithm), **changes).with_epochs(epochs)


def options():
    return Options(seed=3, channels_last=False)


def main(out, index=None, lighthouse=None):
    torch.set_num_threads(1)
    how = {"say": print, "progress": False}
    try:
        if index is not None:
            with Elastic(int(index), lighthouse, "127.0.0.1") as company:
                train_in(company, experiment("rsgd", epochs=40, gamma0=0.05), out, images(), options(), **how)
            os._exit(0)
        elif on_torchrun():
            if os.path.exists("/proc/self/task"):  # called last: what runs now meets an interpreter that ends
                atexit.register(lambda: print("threads at the end:", len(os.listdir("/proc/self/task"))))
            with Ranks.of_torchrun(2, torch.device("cpu")) as company:
                train_in(company, experiment("rsgd"), out, images(), options(), tensorboard=False, **how)
        else:
            train(experiment("rsgd"), out, images(), options(), tensorboard=False, **how)
    except Interrupted:
        sys.exit(130)


if __name__ == "__main__":
    main(*sys.argv[1:])
