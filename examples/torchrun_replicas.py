"""Replicated-SGD with one replica on each process.

torchrun --nproc-per-node 2 examples/torchrun_replicas.py --steps 200
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import wideflat
from wideflat.data import dress_coat
from wideflat.distributed.ending_together import ending_together
from wideflat.distributed.mesh import seed_replica


def main(steps):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replica",))
    torch.manual_seed(seed_replica(mesh["replica"], 0))  # other weights and other batches in each replica

    patterns = dress_coat.load(500, seed=0)
    x, y = patterns.inputs, (patterns.targets > 0).long()
    test_x, test_y = patterns.test_inputs, (patterns.test_targets > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    coupling = wideflat.ReplicaCoupling(model, mesh=mesh["replica"], period=10, mode="proximal", optimizer=opt)
    with torch.no_grad():
        coupling.gamma = coupling.initial_gamma([F.cross_entropy(model(x), y)])
    focusing = wideflat.Focusing(coupling, factor=1e4, total=steps)

    with ending_together():  # an error on one rank ends all of them
        for _ in range(steps):
            batch = torch.randint(len(x), (50,))
            opt.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            coupling.couple()
            opt.step()
            focusing.step()

    distances = coupling.distances().tolist()  # on every rank
    with coupling.at_barycenter(), torch.no_grad():
        wrong = (model(test_x).argmax(1) != test_y).float().mean()
    if dist.get_rank() == 0:
        print(f"test error of the barycenter {100 * wrong:.1f} %, distances {[round(d, 4) for d in distances]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
