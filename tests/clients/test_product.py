"""Every network, plain and with LoRA, in every trainer, by every optimizer: shown, saved, chosen and loaded it is w."""

import pytest
import torch
from drivers import DRIVERS, STEPS, InOrder, data, trainer_arguments
from of_others import WARNINGS
from product import EVERY, Case, covering_part, whole_product
from safetensors.torch import load_file
from tiny_networks import assert_same, make

pytestmark = [pytest.mark.usefixtures("fresh_accelerate"), *WARNINGS]


def differ(ours, theirs):
    return any(not torch.equal(value, theirs[name]) for name, value in ours.items())


def check(case, folder):
    drive = DRIVERS[case.trainer]
    seen = drive(case, folder / "whole")
    assert list(seen.losses) == [EVERY, STEPS]
    for step in (EVERY, STEPS):
        assert_same(seen.evaluated[step], seen.w[step])
        assert_same(seen.saved[step], seen.w[step])
        assert differ(seen.w_prime[step], seen.w[step]) == (case.optimizer != "SAM")  # else all this would mean nothing
    assert seen.best == max(seen.losses, key=seen.losses.get)
    if not case.names_are_lost:
        assert_same(seen.chosen, seen.w[seen.best])
        assert_same(seen.loaded, seen.w[seen.best])
        again = drive(case, folder / "again", resume="whole")
        assert list(again.losses) == [STEPS]
        assert_same(again.w_prime[STEPS], seen.w_prime[STEPS])
        assert_same(again.w[STEPS], seen.w[STEPS])
        assert again.losses[STEPS] == seen.losses[STEPS]


def test_a_whole_vit_is_not_resumed_with_adamw_either(tmp_path):
    """Why `names_are_lost` is an exception: transformers saves other names than those that it then looks for."""
    models, (training, held_out) = [make("vit"), make("vit")], data(Case("vit", False, "Trainer", "SAM", "plain"))
    for model, resume in zip(models, (None, str(tmp_path / f"checkpoint-{EVERY}")), strict=True):
        args = trainer_arguments(tmp_path, lr_scheduler_type="constant")
        trainer = InOrder(model, args, train_dataset=training, eval_dataset=held_out)
        trainer.train(resume_from_checkpoint=resume)
    saved = load_file(tmp_path / f"checkpoint-{EVERY}" / "model.safetensors")
    assert not saved.keys() <= models[0].state_dict().keys()
    assert differ(*(dict(model.named_parameters()) for model in models))


@pytest.mark.parametrize("case", covering_part(), ids=str)
def test_every_pair(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", whole_product(), ids=str)
def test_the_whole_product(case, tmp_path):
    check(case, tmp_path)
