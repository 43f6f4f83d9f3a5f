"""A quick look does not destroy an expensive measurement."""

import torch
from safetensors.torch import save_file

from wideflat.cli import main
from wideflat.energy.profile import LocalEnergy


def test_a_second_measurement_leaves_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.py").write_text(
        "import torch\ndef built():\n    return torch.nn.Linear(4, 2), (torch.randn(16, 4), torch.randint(2, (16,)))\n"
    )
    save_file(torch.nn.Linear(4, 2).state_dict(), "w.safetensors")
    look = ["-q", "local-energy", "w.safetensors", "--build", "measured:built", "--max-passes", "1", "--sigmas"]
    assert main([*look, "0", "0.1", "0.2"]) == 0
    assert main([*look, "0.5"]) == 0 and "result: w.local_energy-2.json" in capsys.readouterr().out
    assert main([*look, "0.6", "--json"]) == 0
    sigmas = [len(LocalEnergy.load(tmp_path / f"w.local_energy{n}.json").sigmas) for n in ("", "-2", "-3")]
    assert sigmas == [3, 1, 1]
    assert main([*look, "0.7", "--out", "w.local_energy.json"]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*look, "0.7", "--overwrite"]) == 0
    assert len(LocalEnergy.load(tmp_path / "w.local_energy.json").sigmas) == 1
