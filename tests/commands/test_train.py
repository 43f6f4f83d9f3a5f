"""``wideflat train``."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import tyro

from wideflat.algorithms import ALGORITHMS
from wideflat.cli import main
from wideflat.commands.train import Command
from wideflat.data import ImageData, ImageSplit
from wideflat.training import Training
from wideflat.training.runs import Run


def images(count=40, test=32):
    """Images whose brightness tells the class, in noise."""
    generator = torch.Generator().manual_seed(0)

    def part(n):
        targets = torch.randint(10, (n,), generator=generator)
        noise = torch.randint(100, (n, 32, 32, 3), generator=generator)
        return ImageSplit((noise + 15 * targets.view(n, 1, 1, 1)).to(torch.uint8).permute(0, 3, 1, 2), targets)

    return ImageData.of("cifar10", tuple("0123456789"), part(count), part(test), source="nowhere")


@pytest.fixture
def cifar(monkeypatch):
    """The command finds generated images where CIFAR-10 would be."""
    monkeypatch.setattr("wideflat.data.load", lambda name, folder=None, allow_altered=False: images())


def test_the_command_trains_resumes_and_reports(cifar, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--no-tensorboard"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "runs/cifar10-smallconvnet-sgd-epochs1-batch-size20-seed0: test error" in text
    assert "paper: 16.5 ± 0.2 % (with the preset's own settings)" in text
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "is finished already" in captured.err
    assert json.loads(captured.out)["epoch"] == 1
    assert main([*arguments, "--no-resume"]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert main([*arguments, "--out", "x", "--algorithm", "rsgd", "-q"]) == 0
    text = capsys.readouterr().out
    assert "replicas" in text and "epoch 1/1" not in text
    assert main([*arguments, "--out", "x"]) == 1
    assert "algorithm is rsgd there and sgd here" in capsys.readouterr().err
    assert main([*arguments, "--out", "x", "--algorithm", "rsgd", "--coupling", "proximal"]) == 1
    assert "coupling is gradient there and proximal here" in capsys.readouterr().err


def test_dropout_from_the_command_line(cifar, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--no-tensorboard", "-q"]
    assert main([*command, "--dropout", "0.5"]) == 0
    (run,) = Path("runs").iterdir()
    assert run.name == "cifar10-smallconvnet-sgd-epochs1-dropout0.5-batch-size20-seed0"
    assert Run.open(run).load_model().dropout.p == 0.5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cifar10-smalconvnet"], "Did you mean 'cifar10-smallconvnet'?"),
        (["committee-sgd"], "there is no preset 'committee-sgd'"),
        (["committee-sgd-fast", "--lr", "1"], "--lr is not for the committee machine: write --set lr=1.0;"),
        (["committee-sgd-fast", "--restarts", "0"], "--restarts must be >= 1, got 0"),
        (["committee-sgd-fast", "--set", "dropuot=0.3"], "NAME=VALUE with one of the names lr, tanh_beta0"),
        (["committee-sgd-fast", "--set", "align=maybe"], "align is true or false, got 'maybe'"),
        (["committee-sgd-fast", "--set", "polish_epochs=1.5"], "polish_epochs is a whole number, got '1.5'"),
        (["committee-sgd-fast", "--set", "dropout=2"], "dropout must be a probability below 1"),
        (["cifar10-smallconvnet", "--set", "dropout=0.3"], "--set is for the committee machine"),
        (["cifar10-smallconvnet", "--epochs", "0"], "--epochs must be >= 1, got 0"),
        (["cifar10-smallconvnet", "--lr", "-1"], "lr must be a finite number >= 0, got -1"),
        (["cifar10-smallconvnet", "--num-replicas", "3"], "--num-replicas is for rsgd"),
        (["cifar10-smallconvnet", "--coupling", "proximal"], "--coupling is for rsgd and rsgdxy, not for sgd"),
        (["cifar10-smallconvnet", "--inner-steps", "3"], "--inner-steps is for esgd"),
        (["cifar10-smallconvnet", "--data", "nowhere"], "was not found in nowhere"),
    ],
)
def test_wrong_uses_of_the_command(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = "--data" in arguments  # which is no wrong use, but work that cannot be done
    assert main(["train", *arguments]) == (1 if missing else 2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_is_interrupted_with_code_130(cifar, tmp_path, capsys, monkeypatch):
    original = Training.iterate

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Training, "iterate", interrupted)
    arguments = ["train", "cifar10-smallconvnet", "--epochs", "1", "--batch-size", "20", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--no-tensorboard"]) == 130
    assert "start the same command again to go on" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- algorithms, jobs


def test_the_help_is_made_from_the_algorithms(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "{" + ",".join(ALGORITHMS) + "}" in text.replace(" ", "")
    for name, algorithm in ALGORITHMS.items():
        assert f"{name}: {algorithm.words}".replace(" ", "") in text.replace(" ", "")


@pytest.mark.parametrize("arguments", [["--algorithm", "sam"], ["--algorithm", "esgd", "--gamma0", "auto"]])
def test_half_precision_ends_where_single_precision_does(arguments, cifar, tmp_path, capsys):
    """Steps of SAM were 65,536 times too long, and Entropy-SGD's gamma0 was not a number."""
    losses = []
    for amp in ("off", "fp16"):
        common = ["--epochs", "1", "--inner-steps", "2"] if "esgd" in arguments else ["--epochs", "2"]
        given = [*arguments, *common, "--batch-size", "20", "--amp", amp, "--out", str(tmp_path / amp)]
        assert main(["train", "cifar10-smallconvnet", *given, "--no-tensorboard", "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["train_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize(
    "command",
    [
        Command("cifar10-resnet18"),
        Command("cifar10-resnet18", algorithm="rsgd", lr=0.03, gamma0="auto", tensorboard=False, fault_tolerant=True),
        Command("cifar10-resnet110", seed=3, snapshots=(0, 2), period=7, amp="bf16", resume=False, limit_data=5),
    ],
)
def test_a_command_can_be_given_again(command):
    assert tyro.cli(Command, args=command.arguments()) == command


def test_jobs_get_the_command_of_the_supervisor(monkeypatch, tmp_path, cifar):
    """Whatever sys.argv is: the command may have been called from Python."""
    started = []

    def supervise(command, num_replicas, lighthouse, say, stdout):
        started.extend(command(a, "http://127.0.0.1:1") for a in range(num_replicas))
        return 130

    monkeypatch.setattr("sys.argv", ["pytest", "--nonsense"])
    monkeypatch.setattr("wideflat.commands.train.supervise", supervise)
    given = ["train", "cifar10-smallconvnet", "--algorithm", "rsgd", "--snapshots", "1", "2", "--evaluate-every", "3"]
    assert main([*given, "--fault-tolerant", "--out", str(tmp_path / "run"), "--json"]) == 130
    assert len(started) == 3
    for a, line in enumerate(started):
        assert line[1:3] == ["-m", "wideflat"] and (line[3] == "-q") == (a > 0)
        job = tyro.cli(Command, args=line[line.index("train") + 1 :])
        assert job.replica == a and job.lighthouse == "http://127.0.0.1:1" and job.out == tmp_path / "run"
        assert job.snapshots == (1, 2) and job.evaluate_every == 3 and job.algorithm == "rsgd" and not job.json


def test_what_cannot_lose_replicas_is_refused(capsys, tmp_path, monkeypatch, cifar):
    monkeypatch.chdir(tmp_path)
    given = ["train", "cifar10-smallconvnet", "--fault-tolerant"]
    assert main([*given, "--algorithm", "esgd"]) == 2
    assert "is for rsgd and rsgdxy, not for esgd, which trains one network" in capsys.readouterr().err
    assert main([*given, "--algorithm", "rsgd", "--replica", "3", "--lighthouse", "http://127.0.0.1:1"]) == 1
    assert "--replica must be at least 0 and below 3, got 3" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main([*given, "--algorithm", "rsgd", "--replica", "0"]) == 1
    assert "start it without torchrun" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
