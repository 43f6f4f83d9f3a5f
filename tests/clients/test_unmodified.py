"""Real clients run the optimizers unmodified: schedulers, AMP, clipping, compile, Lightning, Accelerate, DCP."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

import wideflat

pytestmark = pytest.mark.filterwarnings("ignore:gamma > 0 in the gradient of AdamW")  # it is about state dicts here


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def batch(t):
    generator = torch.Generator().manual_seed(t)
    x = torch.randn(16, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def loss_of(net, t):
    x, y = batch(t)
    return nn.functional.cross_entropy(net(x), y)


def make_opt(net, **settings):
    settings = {"lr": 0.5, "inner_lr": 0.1, "inner_steps": 3, "epsilon": 0.01, "momentum": 0.9} | settings
    return wideflat.EntropySGD(net.parameters(), **settings)


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# --------------------------------------------------------------------------------------------------------- schedulers


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=12),
        lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=12),
        lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[4, 8]),
        lambda opt: lr_scheduler.SequentialLR(
            opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.StepLR(opt, 4)], milestones=[3]
        ),
        lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    ],
    ids=["OneCycleLR", "CosineAnnealingLR", "MultiStepLR", "SequentialLR", "ReduceLROnPlateau"],
)
def test_schedulers_drive_the_outer_step(make):
    net = make_net()
    opt = make_opt(net, nesterov=True)
    scheduler = make(opt)
    rates = []
    for t in range(12):
        opt.zero_grad()
        loss = loss_of(net, t)
        loss.backward()
        if opt.param_groups[0]["position"] == 2:  # the call that moves w
            center = opt.state[net[0].weight]
            w, mu_before = center["center"].clone(), center["mean"].clone()
            velocity = center["outer_momentum_buffer"].clone()
            rate, momentum = opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]
            opt.step()
            assert not torch.equal(center["mean"], mu_before)
            d = w - center["mean"]
            expected = w - rate * (d + momentum * (momentum * velocity + d))
            torch.testing.assert_close(net[0].weight.detach(), expected, rtol=1e-5, atol=1e-6)
        else:
            opt.step()
        with warnings.catch_warnings():
            # SequentialLR itself calls step(epoch), which torch deprecates.
            warnings.filterwarnings("ignore", message="The epoch parameter in `scheduler.step", category=UserWarning)
            scheduler.step(*([loss.item()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append(opt.param_groups[0]["lr"])
        assert opt.param_groups[0]["inner_lr"] == 0.1
    assert len(set(rates)) > 1


def test_a_learning_rate_may_be_a_tensor():
    nets = [make_net(), make_net()]
    for net, lr in zip(nets, (0.5, torch.tensor(0.5)), strict=True):
        opt = make_opt(net, lr=lr)
        scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
        for t in range(7):
            opt.zero_grad()
            loss_of(net, t).backward()
            opt.step()
            scheduler.step()
    assert same(*nets)


# ------------------------------------------------------------------------------- AMP, clipping, accumulation, compile


def test_grad_scaler_skips_a_step_without_advancing_the_cycle():
    net, twin = make_net(), make_net()
    opt, other = make_opt(net), make_opt(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    for t in range(9):
        opt.zero_grad()
        scaler.scale(loss_of(net, t)).backward()
        if t == 4:
            net[0].weight.grad[0, 0] = float("inf")
        else:
            other.zero_grad()
            loss_of(twin, t).backward()
            other.step()
        scaler.step(opt)
        scaler.update()
        if t == 4:
            assert (opt.param_groups[0]["step"], opt.param_groups[0]["position"]) == (4, 1)
    assert opt.param_groups[0]["step"] == 8
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)  # scaling by powers of two, up to rounding


def test_grad_scaler_with_clipping_and_replicas():
    torch.manual_seed(0)
    replicas = wideflat.Replicas(make_net_unseeded, 2)
    twin = copy.deepcopy(replicas)
    runs = []
    for members, scaler in ((replicas, torch.amp.GradScaler("cpu", init_scale=2.0**8)), (twin, None)):
        opt = torch.optim.SGD(members.parameters(), lr=0.1, momentum=0.9)
        coupling = wideflat.ReplicaCoupling(members, period=2, gamma=0.5)
        for t in range(5):
            opt.zero_grad()
            loss = sum(loss_of(net, t) for net in members)
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(opt)
            coupling.couple()
            nn.utils.clip_grad_norm_(members.parameters(), 1.0)
            if scaler:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
        runs.append([p.detach() for p in members.parameters()])
    torch.testing.assert_close(*runs)


def make_net_unseeded():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_autocast_clipping_and_accumulation():
    net, twin = make_net(), make_net()
    opt, other = make_opt(net), make_opt(twin)
    for t in range(6):
        opt.zero_grad()
        for part in range(4):  # four quarters of a mini-batch
            x, y = (tensor[4 * part : 4 * part + 4] for tensor in batch(t))
            (nn.functional.cross_entropy(net(x), y) / 4).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()
        other.zero_grad()
        loss_of(twin, t).backward()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(twin.parameters(), 0.1), norm)
        other.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(net, 9)
    loss.backward()
    opt.step()
    assert opt.param_groups[0]["step"] == 7


def test_compiled_models():
    net, twin = make_net(), make_net()
    compiled = torch.compile(net, backend="aot_eager")
    opt, other = make_opt(compiled), make_opt(twin)
    for t in range(4):
        for model, o in ((compiled, opt), (twin, other)):
            o.zero_grad()
            loss_of(model, t).backward()
            o.step()
    with opt.center(), other.center():
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(compiled(batch(0)[0]), twin(batch(0)[0]))


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint


CHECKPOINTED = {
    "EntropySGD": lambda net: make_opt(net, nesterov=True, weight_decay=0.01),
    "EntropySGD(inner=AdamW)": lambda net: make_opt(net, inner=torch.optim.AdamW),
    "EntropySGD(inner=RMSprop), restarted": lambda net: make_opt(
        net, inner=partial(torch.optim.RMSprop, momentum=0.9), inner_state="restart"
    ),
    "Lookahead": lambda net: wideflat.Lookahead(net.parameters(), inner_steps=3, momentum=0.9),
    "Entropic(AdamW)": lambda net: wideflat.Entropic(
        torch.optim.AdamW(net.parameters()), inner_steps=3, pull=1.0, alpha=0.5
    ),
    "Entropic(Rprop), Adam outside": lambda net: wideflat.Entropic(
        torch.optim.Rprop(net.parameters()), inner_steps=3, outer=partial(torch.optim.Adam, lr=0.1)
    ),
    "SAM(SGD)": lambda net: wideflat.SAM(net.parameters(), lr=0.1),
    "SAM(SGD with momentum)": lambda net: wideflat.SAM(net.parameters(), lr=0.1, momentum=0.9),
    "SAM(Adam)": lambda net: wideflat.SAM(net.parameters(), torch.optim.Adam, lr=0.1),
    "FriendlySAM(Adam)": lambda net: wideflat.FriendlySAM(net.parameters(), torch.optim.Adam, lr=0.1),
    "FriendlySAM(SGD)": lambda net: wideflat.FriendlySAM(net.parameters(), lr=0.1),
    "LookSAM(Adam)": lambda net: wideflat.LookSAM(net.parameters(), torch.optim.Adam, lr=0.1, period=3),
}


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_distributed_checkpoint_round_trip_in_mid_cycle(name, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    net = make_net()
    opt = CHECKPOINTED[name](net)
    for t in range(5):
        _one(net, opt, t)
    saved = {"net": net.state_dict(), "opt": get_optimizer_state_dict(net, opt, options=options)}
    torch.save(saved, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    again = make_net()
    other = CHECKPOINTED[name](again)
    for group in other.param_groups:
        group["lr"] = 9.0
    again.load_state_dict(loaded["net"])
    set_optimizer_state_dict(again, other, loaded["opt"], options=options)
    for t in range(5, 12):
        _one(net, opt, t)
        _one(again, other, t)
    assert same(net, again)


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_asking_for_the_state_of_a_new_optimizer_changes_nothing(name):
    net, twin = make_net(), make_net()
    opt, other = CHECKPOINTED[name](net), CHECKPOINTED[name](twin)
    get_optimizer_state_dict(net, opt)
    assert same(net, twin)
    if name.endswith("SAM(Adam)"):
        return  # torch's Adam counts that step, alone as well
    for t in range(7):
        _one(net, opt, t)
        _one(twin, other, t)
    assert same(net, twin)


@pytest.mark.parametrize("name", ["EntropySGD(inner=AdamW)", "Entropic(AdamW)", "SAM(Adam)", "EntropySGD"])
def test_hooks_of_state_dicts_and_steps_run(name):
    """Among them torch's recipe to load by names: a hook that numbers what was saved anew reaches all of the state."""
    net = make_net()
    opt = CHECKPOINTED[name](net)
    for t in range(5):
        _one(net, opt, t)
    called = []
    opt.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    opt.register_state_dict_post_hook(lambda *_: called.append("after saving"))
    saved = copy.deepcopy(opt.state_dict())
    mixed = {"state": {}, "param_groups": saved["param_groups"]}
    order = [2, 0, 3, 1]
    for position, index in enumerate(order):
        mixed["state"][position] = saved["state"][index]

    def sort(optimizer, state_dict):
        called.append("before loading")
        state = {index: state_dict["state"][position] for position, index in enumerate(order)}
        return {"state": state, "param_groups": state_dict["param_groups"]}

    again = make_net()
    again.load_state_dict(net.state_dict())
    other = CHECKPOINTED[name](again)
    other.register_load_state_dict_pre_hook(sort)
    other.register_load_state_dict_post_hook(lambda o: called.append(len(o.state_dict()["state"])))
    other.load_state_dict(mixed)
    assert called == ["before saving", "after saving", "before loading", 4]
    for t in range(5, 10):
        _one(net, opt, t)
        _one(again, other, t)
    assert same(net, again)


@pytest.mark.parametrize("name", ["EntropySGD", "EntropySGD(inner=AdamW)", "Lookahead", "SAM(Adam)"])
def test_hooks_on_all_optimizers_count_a_step_once(name):
    net = make_net()
    opt = CHECKPOINTED[name](net)
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        for t in range(4):
            _one(net, opt, t)
    finally:
        handle.remove()
    assert seen == [opt] * 4


def _one(net, opt, t):
    def closure():
        opt.zero_grad()
        loss = loss_of(net, t)
        loss.backward()
        return loss

    opt.step(closure)


def test_the_step_that_distributed_checkpoint_makes_on_an_empty_optimizer_moves_nothing():
    net, twin = make_net(), make_net()
    opt, other = make_opt(net, weight_decay=0.1), make_opt(twin, weight_decay=0.1)
    opt.state.clear()  # as if state had not been allocated yet
    state = get_optimizer_state_dict(net, opt)
    assert same(net, twin)
    assert (opt.param_groups[0]["step"], opt.param_groups[0]["position"], opt.param_groups[0]["lr"]) == (0, 0, 0.5)
    assert set(state["state"]["0.weight"]) == {"center", "mean", "momentum_buffer", "outer_momentum_buffer"}
    for t in range(4):
        _one(net, opt, t)
        _one(twin, other, t)
    assert same(net, twin)
    # An empty state with real gradients is a real step.
    opt.state.clear()
    opt.param_groups[0].update(lr=0.0, position=0)
    before = copy.deepcopy(net)
    _one(net, opt, 5)
    assert not same(net, before)


# ---------------------------------------------------------------------------------------------------------- Accelerate


def test_accelerate_with_accumulation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from accelerate import Accelerator

    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(t) for t in range(12)), strict=True)))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = make_net()
    opt = make_opt(net)
    scheduler = lr_scheduler.CosineAnnealingLR(opt, T_max=6)
    net, opt, loader, scheduler = accelerator.prepare(net, opt, DataLoader(data, batch_size=16), scheduler)
    for x, y in loader:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.cross_entropy(net(x), y))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            scheduler.step()
            opt.zero_grad()

    twin = make_net()
    other = make_opt(twin)
    rates = lr_scheduler.CosineAnnealingLR(other, T_max=6)
    for t in range(0, 12, 2):
        for half in (t, t + 1):
            (loss_of(twin, half) / 2).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
        rates.step()
        other.zero_grad()
    assert other.param_groups[0]["step"] == 6
    for a, b in zip(accelerator.unwrap_model(net).parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    accelerator.save_state(tmp_path / "state")
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


# ----------------------------------------------------------------------------------------------------------- Lightning


def lightning_module():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, data, _):
            x, y = data
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, data, _):
            x, y = data
            with self.optimizers().optimizer.center(self.net):
                self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self):
            opt = make_opt(self.net, nesterov=True, weight_decay=0.01)
            scheduler = lr_scheduler.OneCycleLR(opt, max_lr=1.0, total_steps=40)
            self.focusing = wideflat.Focusing(opt, factor=10.0, total=20)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_):
            self.focusing.step()

        def on_save_checkpoint(self, checkpoint):
            checkpoint["focusing"] = self.focusing.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.saved_focusing = checkpoint["focusing"]

        def on_train_start(self):
            if hasattr(self, "saved_focusing"):
                self.focusing.load_state_dict(self.saved_focusing)

    return Module()


# Lightning's own: it calls torch functions that torch 2.13 deprecates, and reports on loaders without workers and on
# continuing in the directory of the first run.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lightning saves the explorer")  # test_lightning_watched has this
def test_lightning_fit_checkpoint_and_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import lightning

    data = TensorDataset(*(torch.cat(parts) for parts in zip(*(batch(t) for t in range(10)), strict=True)))

    def fit(name, epochs, checkpoint=None):
        module = lightning_module()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            default_root_dir=tmp_path / name,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=True,
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, DataLoader(data, 16), DataLoader(data, 16), ckpt_path=checkpoint)
        return module, trainer

    whole, trainer = fit("whole", 2)
    opt = trainer.optimizers[0]
    assert (opt.param_groups[0]["step"], opt.param_groups[0]["position"]) == (10, 1)
    _, first = fit("first", 1)
    assert first.optimizers[0].param_groups[0]["position"] == 2  # the checkpoint is of mid-cycle
    resumed, _ = fit("first", 2, checkpoint=first.checkpoint_callback.best_model_path)
    assert same(whole, resumed)
    assert resumed.focusing.state_dict() == whole.focusing.state_dict()
