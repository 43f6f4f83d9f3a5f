"""Streaming DiLoCo: fragments follow each other, and steps go on while one is on its way."""

import pytest
import torch
from family_twins import OUTER, adamw, made, replicas_from_one, step_all
from small_regression import same, step

import wideflat


def test_fragments_follow_each_other():
    """Every L / P steps one of them is at its center, in all replicas alike; the others go on."""
    replicas = replicas_from_one(2)
    parts = [list(model.parameters())[:1] for model in replicas] + [list(model.parameters())[1:] for model in replicas]
    opt = wideflat.StreamingDiLoCo(adamw(replicas.parameters()), replicas=replicas, inner_steps=4, fragments=2, **OUTER)
    met = []
    for t in range(8):
        step_all(opt, replicas, t)
        met.append([all(torch.equal(p, q) for p, q in zip(*parts[k : k + 2], strict=True)) for k in (0, 2)])
    assert met == [[False, False], [True, False], [False, False], [False, True]] * 2
    assert not opt.at_center and opt.distance() > 0
    opt.flush()
    assert opt.at_center and opt.distance() == 0
    same(replicas[0], replicas[1], rtol=0, atol=0)


class Slow:
    """A manager that notes when something is sent and when it is waited for."""

    def __init__(self):
        self.events = []

    def start_quorum(self):
        pass

    def register_state_dict_fn(self, *_):
        pass

    def allreduce(self, tensor):
        self.events.append("send")
        return self

    def wait(self):
        self.events.append("wait")

    def should_commit(self):
        return True


def test_steps_go_on_while_a_fragment_is_on_its_way():
    model, manager = made(), Slow()
    opt = wideflat.StreamingDiLoCo(
        adamw(model.parameters()),
        replicas=model,
        manager=manager,
        inner_steps=8,
        fragments=[model[0], model[2]],
        delay=3,
    )
    seen = []
    for t in range(8):
        step(opt, model, t)
        seen.append(tuple(manager.events))
        manager.events.clear()
    sent, waited = ("send",) * 2, ("wait",) * 2
    assert seen == [sent, (), (), waited] * 2
    step(opt, model, 8)
    opt.recenter()  # what is on its way is waited for, and forgotten
    assert manager.events == [*sent, *waited]
    assert not any("sent" in state for state in opt.state.values())


def test_fragments_that_cannot_be_meant_are_refused():
    together = replicas_from_one(2)
    with pytest.raises(ValueError, match="multiple of the number of fragments"):
        wideflat.StreamingDiLoCo(adamw(together.parameters()), replicas=together, fragments=3, inner_steps=10)
    for wrong in ({"delay": 5}, {"mix": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            wideflat.StreamingDiLoCo(
                adamw(together.parameters()), replicas=together, fragments=2, inner_steps=10, **wrong
            )
    model = made()
    with pytest.raises(ValueError, match="belongs to one fragment; 2 belong to none"):
        wideflat.StreamingDiLoCo(
            adamw(model.parameters()), replicas=wideflat.Replicas(lambda: model, 1), fragments=[model[0]], inner_steps=2
        )
