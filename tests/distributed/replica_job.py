"""One replica of the fault tests: trains a small network on the embedded images, as a job that may be killed.

Usage: python replica_job.py INDEX NUM_REPLICAS LIGHTHOUSE STEPS FOLDER [SEED [START_FROM]]
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import wideflat
from wideflat.data import dress_coat
from wideflat.distributed.elastic import ElasticReplicas
from wideflat.files import atomic_write
from wideflat.seeds import derive_seed

PERIOD, BATCH = 10, 32


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 2),
    )


def stops_at(path):
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return math.inf


def main(index, num_replicas, lighthouse, steps, folder, seed=0, start_from="barycenter"):
    torch.set_num_threads(1)
    folder = Path(folder)
    log = open(folder / f"replica-{index}.log", "a", buffering=1)  # noqa: SIM115
    say = lambda text: print(f"{time.time():.2f} {text}", file=log)  # noqa: E731
    data = dress_coat.load(size=None, draw="random")
    x, y = data.inputs.float().reshape(-1, 1, 28, 28), (data.targets > 0).long()
    test_x, test_y = data.test_inputs.float().reshape(-1, 1, 28, 28), (data.test_targets > 0).long()
    torch.manual_seed(derive_seed(seed, "weights", index))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    group = ElasticReplicas(
        model,
        index=index,
        num_replicas=num_replicas,
        lighthouse=lighthouse,
        state_dict=lambda: coupling.state_dict(),
        load_state_dict=lambda state: coupling.load_state_dict(state),
        start_from=start_from,
        timeout=10.0,
        start_timeout=60.0,
        patience=40.0,  # nobody waits longer for a meeting: it would be given up
        host="127.0.0.1",
        say=say,
    )
    coupling = wideflat.ReplicaCoupling(group, period=PERIOD, gamma=0.05)
    focusing = wideflat.Focusing(coupling, factor=20.0, total=steps)
    say("starts")
    came_back = group.join()
    say(f"joined at step {coupling.calls} ({'came back' if came_back else 'from the start'})")
    done = 0
    while coupling.calls < steps:
        t = coupling.calls
        (folder / f"step-{index}").write_text(str(t))
        if (folder / "slowly").exists():  # while one is away, so that it comes back in time on any machine
            time.sleep(0.2)
        while t >= stops_at(folder / f"stop-{index}"):  # to be killed here, or until it may go on
            time.sleep(0.01)
        generator = torch.Generator().manual_seed(derive_seed(seed, index, t))
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        coupling.couple()
        optimizer.step()
        focusing.tau = coupling.calls - 1  # one that came back has taken over the number of calls
        focusing.step()
        done += 1
    with coupling.at_barycenter():
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        wideflat.refresh_batch_norm(model, x.split(500))
        model.eval()
        with torch.no_grad():
            error = (model(test_x).argmax(1) != test_y).double().mean().item()
    result = {
        "steps": coupling.calls,
        "done": done,
        "gamma": coupling.gamma,
        "test_error": error,
        "longest_wait": max(group.waits),
        "median_wait": sorted(group.waits)[len(group.waits) // 2],
        "came_back": came_back,
        "alive": group.alive,
        "checksum": weights.double().sum().item(),
    }
    with atomic_write(folder / f"result-{index}.json") as file:
        json.dump(result, file)
    say("finished")
    group.leave()


if __name__ == "__main__":
    kinds = (int, int, str, int, str, int, str)
    main(*(kind(argument) for kind, argument in zip(kinds, sys.argv[1:], strict=False)))
    os._exit(0)  # torchft's threads need not be waited for
