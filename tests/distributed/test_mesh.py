"""Replicas on several ranks train as those in one process do, step by step, in float64; and nothing deadlocks."""

import contextlib
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wideflat
from wideflat.distributed.mesh import FlatBuckets, MeshReplicas, seed_replica

BATCH, CLASSES, STEPS = 8, 3, 7


def make_model(a, batch_norm=True):
    torch.manual_seed(1000 + a)
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(5, 16), norm, nn.Tanh(), nn.Linear(16, CLASSES)).double()


def make_batch(a, t):
    generator = torch.Generator().manual_seed(10 * t + a)
    x = torch.randn(BATCH, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def make_optimizer(parameters, kind="sgd"):
    if kind == "parle":
        return wideflat.EntropySGD(
            parameters, lr=0.7, inner_lr=0.1, inner_steps=2, gamma=0.3, epsilon=0.0, momentum=0.9, weight_decay=1e-3
        )
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def make_coupling(replicas, optimizer, kind, **where):
    if kind == "parle":
        return wideflat.Parle(replicas, optimizer, gamma=0.5, **where)
    if kind == "easgd":
        return wideflat.EASGD(replicas, rate=0.5, period=2, gamma=0.3, **where)
    period = {"every": 1, "third": 3, "proximal": 2}[kind]
    mode = "proximal" if kind == "proximal" else "gradient"
    return wideflat.ReplicaCoupling(replicas, period=period, gamma=0.3, mode=mode, optimizer=optimizer, **where)


def move(kind, optimizer, coupling, focusing):
    """What follows the gradients: Parle couples after the step of its optimizers, the others before it."""
    for act in (optimizer.step, coupling.couple) if kind == "parle" else (coupling.couple, optimizer.step):
        act()
    focusing.step()


def flat(model):
    """All parameters in one vector, whole also where they are sharded."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).clone()


def train_twin(y, kind, batch_norm=True):
    """The oracle: all replicas in one process. Weights after each step, distances, initial gamma, barycenter."""
    models = iter([make_model(a, batch_norm) for a in range(y)])
    replicas = wideflat.Replicas(lambda: next(models), y)
    optimizer = make_optimizer(replicas.parameters(), kind)
    coupling = make_coupling(replicas, optimizer, kind)
    losses = [F.cross_entropy(model(make_batch(a, 99)[0]), make_batch(a, 99)[1]) for a, model in enumerate(replicas)]
    gamma = coupling.initial_gamma(losses)
    focusing = wideflat.Focusing(coupling, factor=5.0, total=STEPS)
    steps = []
    for t in range(STEPS):
        optimizer.zero_grad()
        for a, model in enumerate(replicas):
            x, target = make_batch(a, t)
            F.cross_entropy(model(x), target).backward()
        move(kind, optimizer, coupling, focusing)
        steps.append([flat(model).numpy() for model in replicas])
    center = replicas.barycenter()
    buffers = [b.double().numpy() for b in center.buffers()]
    return steps, coupling.distances().numpy(), gamma, flat(center).numpy(), buffers


# ------------------------------------------------------------------------------- one replica a rank, as in one process


def train_rank(kinds):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replica",))
    a = mesh.get_local_rank()
    results = {}
    for kind in kinds:
        model = make_model(a)
        optimizer = make_optimizer(model.parameters(), kind)
        coupling = make_coupling(model, optimizer, kind, mesh=mesh["replica"])
        x, target = make_batch(a, 99)
        gamma = coupling.initial_gamma([F.cross_entropy(model(x), target)])
        focusing = wideflat.Focusing(coupling, factor=5.0, total=STEPS)
        steps = []
        for t in range(STEPS):
            if t > 2:
                coupling.prefetch()  # changes nothing
            optimizer.zero_grad()
            x, target = make_batch(a, t)
            F.cross_entropy(model(x), target).backward()
            move(kind, optimizer, coupling, focusing)
            steps.append(flat(model))
        before = flat(model)
        with coupling.at_barycenter():
            inside = flat(model)
        assert torch.equal(flat(model), before)
        center = coupling.barycenter()
        assert torch.equal(flat(center), inside)
        buffers = [b.double() for b in center.buffers()]
        results[kind] = steps, coupling.distances(), gamma, flat(center), buffers
    return results


KINDS = ["every", "third", "proximal", "parle", "easgd"]


@pytest.mark.parametrize("y", [2, 3, 4])
@pytest.mark.filterwarnings("ignore:the model holds the explorer")  # compared wherever the cycle is
def test_ranks_train_as_one_process_does(ranks, y):
    kinds = KINDS if y == 3 else KINDS[:3]
    results = ranks(train_rank, y, kinds)
    for kind in kinds:
        steps, distances, gamma, center, buffers = train_twin(y, kind)
        for a, result in enumerate(results):
            mine = result[kind]
            for t in range(STEPS):
                np.testing.assert_allclose(mine[0][t], steps[t][a], rtol=1e-11, atol=1e-13, err_msg=f"{kind} {a} {t}")
            np.testing.assert_allclose(mine[1], distances, rtol=1e-10)
            assert math.isclose(mine[2], gamma, rel_tol=1e-12)
            np.testing.assert_allclose(mine[3], center, rtol=1e-11, atol=1e-13)
            for buffer, expected in zip(mine[4], buffers, strict=True):
                np.testing.assert_allclose(buffer, expected, rtol=1e-12)
        assert len({result[kind][2] for result in results}) == 1  # gamma is the same to the last bit on every rank


# ------------------------------------------------------------------------- two ranks a replica: data-parallel, sharded


def train_data_parallel_rank(form, kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    a, part = mesh["replica"].get_local_rank(), mesh["dp"].get_local_rank()
    model = make_model(a, batch_norm=False)
    if form == "ddp":
        model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    else:
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = make_optimizer(model.parameters(), kind)
    coupling = make_coupling(model, optimizer, kind, mesh=mesh["replica"])
    x, target = make_batch(a, 99)
    with torch.no_grad():
        gamma = coupling.initial_gamma([F.cross_entropy(model(x), target)])
    if form == "fsdp":
        model.reshard()
    focusing = wideflat.Focusing(coupling, factor=5.0, total=STEPS)
    steps = []
    for t in range(STEPS):
        optimizer.zero_grad()
        x, target = (tensor.chunk(2)[part] for tensor in make_batch(a, t))
        F.cross_entropy(model(x), target).backward()
        first, second = (optimizer.step, coupling.couple) if kind == "parle" else (coupling.couple, optimizer.step)
        first(), second()
        focusing.step()
        steps.append(flat(model))
    with coupling.at_barycenter():
        center = flat(model)
    if form == "ddp":
        assert torch.equal(flat(coupling.barycenter()), center)
    else:
        with contextlib.suppress(ValueError):
            coupling.barycenter()
            raise AssertionError("a sharded network has no copy on one rank")
    sent = max(buckets.nbytes for buckets in coupling.group._layouts.values())
    return a, steps, coupling.distances(), gamma, center, sent


SHARDED = [("fsdp", kind) for kind in ("third", "proximal", "parle", "easgd")]


@pytest.mark.parametrize(("form", "kind"), [("ddp", "third"), *SHARDED])
@pytest.mark.filterwarnings("ignore:the model holds the explorer")  # compared wherever the cycle is
def test_data_parallel_groups_train_as_one_process_does(ranks, form, kind):
    steps, distances, gamma, center, _ = train_twin(2, kind, batch_norm=False)
    whole = 8 * len(center)
    for a, mine, own_distances, own_gamma, own_center, sent in ranks(train_data_parallel_rank, 4, form, kind):
        for t in range(STEPS):
            np.testing.assert_allclose(mine[t], steps[t][a], rtol=1e-10, atol=1e-12, err_msg=f"{form} {a} {t}")
        np.testing.assert_allclose(own_distances, distances, rtol=1e-10)
        assert math.isclose(own_gamma, gamma, rel_tol=1e-12)
        np.testing.assert_allclose(own_center, center, rtol=1e-10, atol=1e-12)
        if form == "fsdp":
            assert sent < 0.7 * whole  # each rank sends its shard alone


# ------------------------------------------------------------------------------------------------- nothing deadlocks


def train_with_skipped_steps():
    """Rank 1 has gradients that overflow at every second step, so its scaler skips those; it also runs out of data."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("replica",))
    a = mesh.get_local_rank()
    model = make_model(a).float()
    optimizer = make_optimizer(model.parameters())
    coupling = wideflat.ReplicaCoupling(model, mesh=mesh, period=1, gamma=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    skipped = 0
    for t in range(6):
        optimizer.zero_grad()
        x, target = make_batch(a, t)
        if a == 1 and t == 5:
            x, target = x[:0], target[:0]  # an empty last batch: no forward, no backward
        if len(x):
            loss = F.cross_entropy(model(x.float()), target) * (math.inf if a == 1 and t % 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        coupling.couple()
        if len(x):
            before = flat(model)
            scaler.step(optimizer)
            skipped += torch.equal(flat(model), before)
            scaler.update()
        else:
            optimizer.step()
    return skipped, coupling.distances()


def test_a_rank_that_skips_steps_or_has_no_data_stops_nobody(ranks):
    results = ranks(train_with_skipped_steps, 2)
    assert [skipped for skipped, _ in results] == [0, 2]
    for _, distances in results:
        np.testing.assert_allclose(distances, distances_with_skipped_steps(), rtol=1e-5)


def distances_with_skipped_steps():
    """In one process: replica 1 takes neither its second nor its fourth step, and its last by the pull alone."""
    models = iter([make_model(a).float() for a in range(2)])
    replicas = wideflat.Replicas(lambda: next(models), 2)
    optimizers = [make_optimizer(model.parameters()) for model in replicas]
    coupling = wideflat.ReplicaCoupling(replicas, period=1, gamma=0.1)
    for t in range(6):
        for a, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            if (a, t) != (1, 5):
                x, target = make_batch(a, t)
                F.cross_entropy(model(x.float()), target).backward()
        coupling.couple()
        for a, optimizer in enumerate(optimizers):
            if a == 0 or t not in (1, 3):
                optimizer.step()
    return coupling.distances()


# ----------------------------------------------------------------------------------------------------------- refusals


def refusals():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    messages = {}

    def expect(name, call, kind=ValueError):
        try:
            call()
        except kind as error:
            messages[name] = str(error)

    expect("two-dimensional", lambda: wideflat.ReplicaCoupling(make_model(0), mesh=mesh))
    expect("no mesh", lambda: wideflat.ReplicaCoupling(make_model(0)), TypeError)
    expect("replicas", lambda: wideflat.ReplicaCoupling(wideflat.Replicas(lambda: make_model(0)), mesh=mesh), TypeError)
    whole = DistributedDataParallel(make_model(0))
    expect("whole world", lambda: wideflat.ReplicaCoupling(whole, mesh=mesh["replica"]))
    expect("inside", lambda: wideflat.ReplicaCoupling(nn.Sequential(whole), mesh=mesh["replica"]))
    sharded = fully_shard(make_model(0), mesh=mesh["replica"])
    expect("sharded", lambda: wideflat.ReplicaCoupling(sharded, mesh=mesh["replica"]))
    hybrid = fully_shard(make_model(0), mesh=mesh)
    expect("hybrid", lambda: wideflat.ReplicaCoupling(hybrid, mesh=mesh["replica"]))
    other = nn.Linear(2 + mesh["replica"].get_local_rank(), 2)
    expect("architecture", lambda: wideflat.ReplicaCoupling(other, mesh=mesh["replica"]))
    equal = wideflat.ReplicaCoupling(make_model(0), mesh=mesh["replica"])
    expect("coincide", lambda: equal.initial_gamma([1.0]))

    # The bare network is given, but it trains within DistributedDataParallel over all ranks.
    model = make_model(dist.get_rank())
    hidden = DistributedDataParallel(model)
    coupling = wideflat.ReplicaCoupling(model, mesh=mesh["replica"], period=1, gamma=0.1)
    optimizer = make_optimizer(model.parameters())

    def train():
        for t in range(3):
            optimizer.zero_grad()
            x, target = make_batch(dist.get_rank(), t)
            F.cross_entropy(hidden(x), target).backward()
            coupling.couple()
            optimizer.step()

    expect("hidden", train, RuntimeError)

    moved = wideflat.ReplicaCoupling(make_model(mesh["replica"].get_local_rank()), mesh=mesh["replica"], period=1)
    moved.gamma = 0.1

    def change():
        assert not moved.prefetch()  # the first attraction looks at the replicas before
        moved.couple()
        assert moved.prefetch()
        with torch.no_grad():
            moved.group.model[0].weight.mul_(2)
        moved.couple()

    expect("changed", change, RuntimeError)
    return messages


def test_what_would_make_replicas_equal_is_refused_with_the_reason(ranks):
    for messages in ranks(refusals, 4):
        assert 'mesh["replica"]' in messages["two-dimensional"]
        assert 'mesh["replica"]' in messages["no mesh"]
        assert "this rank's network" in messages["replicas"]
        for name in ("whole world", "inside"):
            assert 'DistributedDataParallel(model, device_mesh=mesh["dp"])' in messages[name]
        for name in ("sharded", "hybrid"):
            assert 'fully_shard(model, mesh=mesh["dp"])' in messages[name]
        assert "one architecture" in messages["architecture"]
        assert "independent initialisations" in messages["coincide"]
        assert "equal to the last bit" in messages["hidden"]
        assert "between prefetch() and couple()" in messages["changed"]


# ------------------------------------------------------------------------------------------- seeds, statistics, parts


def seeds_and_statistics(empty):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "dp"))
    seed = seed_replica(mesh["replica"], 7)
    weights = flat(nn.Linear(3, 3))
    model = make_model(0)
    loader = [make_batch(0, t)[0] for t in range(8)][dist.get_rank() :: 4]
    if dist.get_rank() == 3 and empty:
        loader = []
    wideflat.refresh_batch_norm(model, loader, group=dist.group.WORLD)
    return seed, weights, [b.double() for b in model.buffers()]


@pytest.mark.parametrize("empty", [False, True])
def test_seeds_differ_between_replicas_and_statistics_merge(ranks, empty):
    results = ranks(seeds_and_statistics, 4, empty)
    seeds = [seed for seed, _, _ in results]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert np.array_equal(results[0][1], results[1][1]) and not np.array_equal(results[0][1], results[2][1])
    model = make_model(0)
    wideflat.refresh_batch_norm(model, [make_batch(0, t)[0] for t in range(8) if not (empty and t % 4 == 3)])
    for _, _, buffers in results:
        for buffer, expected in zip(buffers, model.buffers(), strict=True):
            np.testing.assert_allclose(buffer, expected.double().numpy(), rtol=1e-12)


def failing_statistics():
    def loader():
        yield make_batch(0, 0)[0]
        if dist.get_rank() == 1:
            raise OSError("the disk is gone")

    model = make_model(0)
    before = model[1].running_mean.clone()
    try:
        wideflat.refresh_batch_norm(model, loader(), group=dist.group.WORLD)
    except (OSError, RuntimeError) as error:
        assert torch.equal(model[1].running_mean, before)
        return str(error)


def test_statistics_that_fail_on_one_rank_fail_on_all(ranks):
    assert all("the disk is gone" in message for message in ranks(failing_statistics, 2))


def test_buckets_keep_strides_and_split_by_size_and_dtype():
    image = torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    tensors = [image, torch.ones(7), torch.zeros(3, dtype=torch.float64), torch.full((50,), 2.0), torch.eye(4)[:, ::2]]
    buckets = FlatBuckets(tensors, size=400)
    assert buckets.indices == [[0], [1, 3, 4], [2]]
    for number in range(len(buckets)):
        buckets.fill(number, tensors)
        for view, i in zip(buckets.views[number], buckets.indices[number], strict=True):
            assert torch.equal(view, tensors[i])
    assert buckets.views[0][0].stride() == image.stride()
    assert buckets.nbytes == sum(tensor.nbytes for tensor in tensors)


def several_buckets():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))
    model = make_model(mesh.get_local_rank())
    small, large = MeshReplicas(model, mesh, bucket=64), MeshReplicas(model, mesh)
    members = [[p.detach() for p in model.parameters()]]
    means = [[torch.cat([piece.flatten() for _, _, w in g.blocks(members) for piece in w])] for g in (small, large)]
    assert len(next(iter(small._layouts.values()))) > 3 > len(next(iter(large._layouts.values())))
    return torch.equal(means[0][0], means[1][0])


def test_the_size_of_buckets_does_not_matter(ranks):
    assert all(ranks(several_buckets, 2))


@pytest.mark.parametrize("without", ["mps", "cpu"])
def test_numbers_are_exchanged_whole_also_without_float64_on_the_device(monkeypatch, without):
    """One process that takes itself for two: what is sent, and what comes of it."""
    sent = []

    def all_gather(into, own, group):
        sent.append(own.dtype)
        for tensor in into:
            tensor.copy_(own)

    monkeypatch.setattr("wideflat.kernels.float64.WITHOUT", {without})
    monkeypatch.setattr(dist, "all_gather", all_gather)
    replicas = object.__new__(MeshReplicas)
    replicas.model, replicas.num_replicas, replicas.group = nn.Linear(1, 1), 2, None
    assert replicas.gather(torch.tensor([1 / 3, 1e300], dtype=torch.float64)).tolist() == [1 / 3, 1e300] * 2
    assert sent == [torch.int64 if without == "cpu" else torch.float64]
