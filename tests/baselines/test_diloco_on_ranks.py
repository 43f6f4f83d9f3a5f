"""DiLoCo on two ranks: on a mesh and with a manager it is torchft's own, whole and in fragments."""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # a rank has no conftest

import torch
import torch.distributed as dist
from small_regression import loss_of, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import wideflat


class Manager:
    """What DiLoCo asks of torchft's manager, over the ranks that there are: nobody leaves, no lighthouse is needed."""

    _use_async_quorum = False

    def __init__(self, fails=()):
        self.commits, self.meetings, self.fails = 0, 0, fails

    def start_quorum(self):
        self.meetings += 1

    def allreduce(self, tensor, should_quantize=False):
        tensor.div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True)

    def should_commit(self):
        succeeded = self.meetings not in self.fails
        self.commits += succeeded
        return succeeded

    def current_step(self):
        return self.commits

    def register_state_dict_fn(self, *_):
        pass

    def allow_state_dict_read(self):
        pass

    def disallow_state_dict_read(self):
        pass


def train(model, opt, steps=14, start=0):
    rank, weights = dist.get_rank(), []
    for t in range(start, steps):
        opt.zero_grad()
        loss_of(model, 2 * t + rank).backward()
        opt.step()
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return torch.stack(weights)


def parts():
    torch.manual_seed(0)
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


OUTER = {"inner_steps": 4, "outer_lr": 0.6, "outer_momentum": 0.8}


def theirs(fragments, fails=(), **late):
    from torchft.local_sgd import DiLoCo

    model, adamw = parts()
    pieces = [model[0], model[2]] if fragments else [model]
    outers = [torch.optim.SGD(piece.parameters(), lr=0.6, momentum=0.8, nesterov=True) for piece in pieces]
    with DiLoCo(Manager(fails), pieces, adamw, outers if fragments else outers[0], sync_every=4, **late):
        return train(model, adamw)


def ours(fragments, **where):
    model, adamw = parts()
    if fragments:
        opt = wideflat.StreamingDiLoCo(adamw, replicas=model, fragments=[model[0], model[2]], **OUTER, **where)
    else:
        opt = wideflat.DiLoCo(adamw, replicas=model, **OUTER, **where)
    return train(model, opt)


#: Steps that an exchange has for itself, and the share of its own weights that a replica keeps.
LATE = [(1, 0.0), (1, 0.5), (0, 0.5)]


def resumed(mesh):
    """Saved while a fragment is on its way, and gone on with by a new optimizer."""
    late = {"inner_steps": 8, "outer_lr": 0.6, "outer_momentum": 0.8, "delay": 2, "mix": 0.25, "mesh": mesh}
    results = []
    for stop in (None, 3, 7):
        model, adamw = parts()
        opt = wideflat.StreamingDiLoCo(adamw, replicas=model, fragments=[model[0], model[2]], **late)
        if stop is None:
            results.append(train(model, opt)[-1])
            continue
        train(model, opt, stop)
        saved = [copy.deepcopy(one.state_dict()) for one in (model, opt)]
        model, adamw = parts()
        opt = wideflat.StreamingDiLoCo(adamw, replicas=model, fragments=[model[0], model[2]], **late)
        for one, state in zip((model, opt), saved, strict=True):
            one.load_state_dict(state)
        results.append(train(model, opt, start=stop)[-1])
    return results


def compare():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))["replica"]
    results = {}
    for fragments in (False, True):
        results[fragments, "theirs"] = theirs(fragments)
        results[fragments, "mesh"] = ours(fragments, mesh=mesh)
        results[fragments, "manager"] = ours(fragments, manager=Manager())
    for delay, mix in LATE:
        results[delay, mix, "theirs"] = theirs(True, fragment_sync_delay=delay, fragment_update_alpha=mix)
        results[delay, mix, "mesh"] = ours(True, mesh=mesh, delay=delay, mix=mix)
        results[delay, mix, "manager"] = ours(True, manager=Manager(), delay=delay, mix=mix)
    results["failed and late", "theirs"] = theirs(True, fails=(2,), fragment_sync_delay=1, fragment_update_alpha=0.5)
    results["failed and late", "manager"] = ours(True, manager=Manager(fails=(2,)), delay=1, mix=0.5)
    results["resumed"] = resumed(mesh)
    results["failed", "theirs"] = theirs(False, fails=(2,))
    results["failed", "manager"] = ours(False, manager=Manager(fails=(2,)))
    torch.manual_seed(dist.get_rank())
    model = make_model()
    try:
        wideflat.DiLoCo(torch.optim.AdamW(model.parameters()), replicas=model, mesh=mesh)
    except ValueError as error:
        results["apart"] = str(error)
    return results


def test_it_is_torchfts_own_on_two_ranks(ranks):
    results = ranks(compare, 2)
    for rank in results:
        for fragments in (False, True):
            expected = torch.as_tensor(rank[fragments, "theirs"])
            for where in ("mesh", "manager"):
                torch.testing.assert_close(torch.as_tensor(rank[fragments, where]), expected, rtol=1e-9, atol=1e-11)
        for late in (*LATE, ("failed and late",)):
            expected = torch.as_tensor(rank[(*late, "theirs")])
            for where in {"mesh", "manager"} if len(late) == 2 else {"manager"}:
                torch.testing.assert_close(torch.as_tensor(rank[(*late, where)]), expected, rtol=1e-9, atol=1e-11)
        whole, *others = map(torch.as_tensor, rank["resumed"])
        assert all(torch.equal(whole, other) for other in others)
        expected = torch.as_tensor(rank["failed", "theirs"])
        torch.testing.assert_close(torch.as_tensor(rank["failed", "manager"]), expected, rtol=1e-9, atol=1e-11)
        assert (rank["failed", "manager"][7] == rank["failed", "manager"][3]).all()  # that outer step was left out
        assert "start from one w" in rank["apart"]
    for t in (3, 7, 11):  # at the ends of cycles both ranks hold the same
        assert (results[0][False, "mesh"][t] == results[1][False, "mesh"][t]).all()
    assert not (results[0][False, "mesh"][12] == results[1][False, "mesh"][12]).all()
