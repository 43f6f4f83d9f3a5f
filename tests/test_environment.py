"""Where and with what something was computed."""

import datetime
import json
import subprocess
import sys
import types

import pytest
import torch

import wideflat
from wideflat import environment as module
from wideflat.environment import choose_device, environment, now


def test_the_record_is_of_this_process_and_fits_into_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/wideflat", "train", "x"])
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert (found["wideflat"], found["torch"]) == (wideflat.__version__, str(torch.__version__))
    assert found["threads"] == torch.get_num_threads() and found["command"] == "wideflat train x"


def test_a_tree_that_git_cannot_read_has_no_commit(monkeypatch, tmp_path):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "__file__", str(tmp_path / "wideflat" / "environment.py"))
    assert environment()["commit"] is None

    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert environment()["commit"] is None


@pytest.mark.parametrize(("cuda", "mps", "chosen"), [(False, False, "cpu"), (False, True, "mps"), (True, True, "cuda")])
def test_auto_is_a_gpu_if_there_is_one(monkeypatch, cuda, mps, chosen):
    there = types.SimpleNamespace(is_available=lambda: mps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends, "mps", there)
    assert choose_device().type == choose_device(None).type == chosen
    assert choose_device("cpu").type == "cpu"


def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(ValueError, match="device must be a device"):
        choose_device("cuda:99")


def test_the_time_has_a_zone():
    assert datetime.datetime.fromisoformat(now()).utcoffset() == datetime.timedelta(0)
