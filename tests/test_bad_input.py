"""Wrong uses of the command line: each ends with a message that says what is wrong, none with a traceback."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import wideflat
from wideflat import cli
from wideflat.files import atomic_write


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """No data sets of this machine are seen, and everything is written to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("WIDEFLAT_DATA", str(tmp_path / "no-data"))
    torch.save({"weight": torch.zeros(2, 3)}, "weights.pt")
    torch.save(torch.nn.Linear(5, 2).state_dict(), "fits.pt")
    np.savez("nothing.npz", a=np.zeros(3))
    good = {"weights": np.ones((3, 4)), "inputs": np.ones((2, 4)), "targets": np.array([1.0, -1.0])}
    np.savez("even.npz", **{**good, "weights": np.ones((2, 4))})
    np.savez("nan.npz", **{**good, "weights": np.full((3, 4), np.nan)})
    np.savez("shapes.npz", **{**good, "inputs": np.ones((2, 5))})
    np.savez("labels.npz", **{**good, "targets": np.array([0.0, 1.0])})
    np.savez("good.npz", **good)
    content = (tmp_path / "good.npz").read_bytes()
    (tmp_path / "truncated.npz").write_bytes(content[: len(content) // 2])
    np.save("pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    os.rename("pickled.npy", "pickled.npz")
    (tmp_path / "text.safetensors").write_text("not tensors")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("a file where a folder is needed")
    (tmp_path / "broken-run").mkdir()
    (tmp_path / "broken-run" / "config.json").write_text('{"format": 1, "experi')
    (tmp_path / "future-run").mkdir()
    (tmp_path / "future-run" / "config.json").write_text('{"format": 999}')
    folder = tmp_path / "truncated-data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in [f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(b"\0" * 100)
    (tmp_path / "nets.py").write_text(
        "import torch\n"
        "def build():\n"
        "    return torch.nn.Linear(5, 2), (torch.zeros(4, 5), torch.zeros(4, dtype=torch.long))\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


#: What was typed, the exit code, and what the message must contain.
WRONG = [
    # names
    ("trian", 2, "Did you mean 'train'?"),
    ("--completion tcsh", 2, "bash, zsh, fish"),
    ("train cifar10-resnet81", 2, "cifar10-resnet18"),
    ("train committee-sgd-fats", 2, "committee-sgd-fast"),
    ("presets cifar10-resnet81", 2, "cifar10-resnet18"),
    ("presets cifar10-resnet18 --algorithm adam", 2, "sgd, rsgd"),
    ("data verify cifar11", 2, "cifar10"),
    ("reproduce table1 --quick --rows cifar10-resnet81", 2, "cifar10-resnet18"),
    # numbers
    ("demo --restarts 0", 2, "--restarts must be >= 1, got 0"),
    ("train cifar10-smallconvnet --epochs 0", 2, "epochs must be"),
    ("train cifar10-smallconvnet --lr -1", 2, "lr must be"),
    ("train cifar10-smallconvnet --momentum 1.5", 2, "momentum must be"),
    ("train cifar10-smallconvnet --algorithm rsgd --period 0", 2, "period must be"),
    ("local-energy fits.pt --build nets:build --device warp", 1, "warp"),
    ("local-entropy good.npz --deltas -1", 1, "must be"),
    ("local-energy good.npz --sigmas -0.5", 1, "sigma"),
    # missing files
    ("train cifar10-smallconvnet", 1, "wideflat data fetch cifar10"),
    ("train tinyimagenet-resnet50", 1, "wideflat data fetch tiny-imagenet"),
    ("train cifar10-smallconvnet --data nowhere", 1, "nowhere"),
    ("local-energy nowhere", 1, "nowhere"),
    ("local-entropy nowhere.npz", 1, "nowhere.npz"),
    ("report nowhere", 1, "there is no nowhere"),
    ("report foreign", 1, "nothing to report"),
    ("reproduce fig2 --redraw", 1, "holds no tables"),
    ("reproduce fig3 --data nowhere", 1, "nowhere"),
    # wrong or damaged files
    ("train cifar10-smallconvnet --data truncated-data", 1, "data_batch_1.bin"),
    ("data verify cifar10 --data truncated-data", 1, "data_batch_1.bin"),
    ("local-entropy nothing.npz", 1, "weights"),
    ("local-entropy even.npz", 1, "odd"),
    ("local-entropy nan.npz", 1, "finite"),
    ("local-entropy shapes.npz", 1, "shape"),
    ("local-entropy labels.npz", 1, "+1"),
    ("local-entropy truncated.npz", 1, "truncated.npz"),
    ("local-entropy pickled.npz", 1, "pickled.npz"),
    ("local-energy text.safetensors --build nets:build", 1, "text.safetensors"),
    ("local-energy weights.pt", 2, "--build"),
    ("local-energy weights.pt --build nets", 2, "module:function"),
    ("local-energy weights.pt --build nowhere:build", 2, "nowhere"),
    ("local-energy weights.pt --build nets:missing", 2, "missing"),
    ("local-energy weights.pt --build nets:number", 2, "number"),
    ("local-energy weights.pt --build nets:build", 1, "size mismatch|shape|does not fit"),
    ("local-energy broken-run", 1, "config.json"),
    ("local-energy future-run", 1, "later version"),
    ("report broken-run", 1, "config.json"),
    # places that cannot be written
    ("train committee-sgd-fast --restarts 1 --out foreign", 1, "foreign"),
    ("train committee-sgd-fast --restarts 1 --out file", 1, "file"),
    ("demo --restarts 1 --out file/demo", 1, "file"),
]


@pytest.mark.parametrize(("typed", "code", "message"), WRONG, ids=[typed for typed, _, _ in WRONG])
def test_wrong_uses_are_explained(typed, code, message, capsys):
    assert cli.main([*typed.split(), "--quiet"]) == code
    captured = capsys.readouterr()
    said = captured.err + captured.out
    assert any(part in said for part in message.split("|")), said
    assert "Traceback" not in said
    assert Path("foreign/thesis.tex").read_text() == "precious"


#: Errors that the parser of the command line finds: exit code 2, with a hint.
WRONG_FOR_THE_PARSER = [
    ("train cifar10-smallconvnet --epochs ten", "ten"),
    ("train cifar10-smallconvnet --epoch 10", "--epochs"),
    ("train", "required"),
    ("train cifar10-smallconvnet --algorithm adam", "adam"),
    ("reproduce fig9", "fig9"),
    ("reproduce fig1 --rows cifar10-resnet18", "--rows"),
    ("local-energy runs/a --noise white", "white"),
]


@pytest.mark.parametrize(("typed", "message"), WRONG_FOR_THE_PARSER, ids=[typed for typed, _ in WRONG_FOR_THE_PARSER])
def test_the_parser_explains_and_suggests(typed, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(typed.split())
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "No space left"), (errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only")],
)
def test_a_disk_that_refuses_is_named_and_the_old_result_stays(number, words, monkeypatch, capsys, tmp_path):
    result = tmp_path / "local_entropy.npz"
    with atomic_write(result) as file:
        file.write("an earlier result")

    def refuse(*_):
        raise OSError(number, os.strerror(number), str(result))

    monkeypatch.setattr("wideflat.files.os.fsync", refuse)
    assert cli.main(["local-entropy", "good.npz", "--deltas", "0.1", "--quiet"]) == cli.FAILED
    assert words in capsys.readouterr().err
    assert result.read_text() == "an earlier result"
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda w: wideflat.SAM([w], lambda *_, **__: None), "what base returns"),
        (lambda w: wideflat.EntropySGD([w], inner=lambda *_, **__: None), "what inner returns"),
    ],
)
def test_a_function_that_makes_no_optimizer_is_named(make, name):
    with pytest.raises(TypeError, match=f"{name} must be a torch optimizer, got None"):
        make(torch.nn.Parameter(torch.ones(3)))


@pytest.mark.parametrize("wrong", ["adamw", torch.optim.AdamW([nn.Parameter(torch.ones(1))]), nn.Linear(1, 1)])
def test_what_does_not_make_optimizers_is_told_what_does(wrong):
    w = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([w])
    for name, make in (
        ("inner", lambda: wideflat.EntropySGD([w], inner=wrong)),
        ("base", lambda: wideflat.SAM([w], wrong)),
        ("outer", lambda: wideflat.Entropic(sgd, outer=wrong)),
    ):
        with pytest.raises(TypeError, match=f"{name} must make an optimizer: a class of torch optimizers"):
            make()


def test_a_rate_beyond_every_integer_of_torch_is_a_number():
    w = torch.nn.Parameter(torch.ones(3))
    assert wideflat.SAM([w], lr=10**30).param_groups[0]["lr"] == 1e30


@pytest.mark.parametrize("inner", ["adamw", torch.optim.AdamW([torch.zeros(1, requires_grad=True)])])
def test_an_inner_that_makes_no_optimizer_is_refused_with_one_that_does(inner):
    with pytest.raises(TypeError, match=r"inner must make an optimizer: .* such as torch\.optim\.AdamW"):
        wideflat.EntropySGD([torch.zeros(1, requires_grad=True)], lr=0.5, inner=inner)


def test_the_local_entropy_of_a_network_is_refused_with_what_there_is_for_it():
    with pytest.raises(TypeError, match=r"for committee machines.*wideflat\.free_entropy"):
        wideflat.local_entropy(torch.nn.Linear(3, 1), torch.ones(2, 3), torch.ones(2))
