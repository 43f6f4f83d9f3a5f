"""Networks that are given to commands: what cannot be read is refused with what to do."""

import pytest
import torch
from torch import nn

from wideflat.commands import UsageError
from wideflat.commands.given import from_checkpoint, load_weights, named_function, run_at


def test_a_checkpoint_is_loaded_into_what_the_function_builds(builder, tmp_path):
    model, (inputs, targets), options = from_checkpoint(f"{builder}:build", tmp_path / "weights.pt", "cpu", "it")
    assert torch.equal(model[0].weight, torch.load(tmp_path / "weights.pt")["0.weight"])
    assert len(inputs) == len(targets) == 64 and options == {}
    with pytest.raises(ValueError, match=r"must return \(model, data\) or \(model, data, options of it\); got int"):
        from_checkpoint(f"{builder}:wrong", tmp_path / "weights.pt", "cpu", "it")


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", None])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_states_within_other_things_and_with_prefixes(tmp_path, key, prefix):
    state = {f"{prefix}{name}": value for name, value in nn.Linear(2, 1).state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, tmp_path / "w.pt")
    model = nn.Linear(2, 1)
    load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model.weight, state[f"{prefix}weight"])


def test_what_is_refused(tmp_path):
    torch.save({"a": 3}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="holds no state dictionary of tensors"):
        load_weights(nn.Linear(2, 1), tmp_path / "w.pt")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        load_weights(nn.Linear(2, 1), tmp_path / "none.pt")
    with pytest.raises(UsageError, match="must be module:function"):
        named_function("module")
    with pytest.raises(UsageError, match="has no function nothing"):
        named_function("json:nothing")
    with pytest.raises(UsageError, match="is a checkpoint: give --build"):
        run_at(tmp_path / "w.pt")
    with pytest.raises(UsageError, match="holds committee machines, which are not for this"):
        run_at(tmp_path / "w.npz", "which are not for this")
