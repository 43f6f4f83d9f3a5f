import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

import wideflat
from wideflat.presets import preset
from wideflat.training.runs import DamagedState, Run, RunInUse

CONFIG = {"experiment": {"name": "mine", "lr": 0.1, "drops": (1, 2)}, "seed": 0}


def test_another_experiment_in_the_directory_is_refused_by_what_differs(tmp_path):
    Run.create(tmp_path / "run", CONFIG)
    assert Run.create(tmp_path / "run", CONFIG).config["experiment"]["drops"] == [1, 2]
    with pytest.raises(ValueError, match=r"holds another experiment: lr is 0\.1 there and 0\.2 here, seed is 0 .* 1 "):
        Run.create(tmp_path / "run", {"experiment": {"name": "mine", "lr": 0.2, "drops": (1, 2)}, "seed": 1})


def test_a_remark_that_was_worded_anew_does_not_matter(tmp_path):
    Run.create(tmp_path / "run", {"experiment": {"lr": 0.1, "notes": [["lr", "ours"]]}})
    Run.create(tmp_path / "run", {"experiment": {"lr": 0.1, "notes": [["lr", "not the paper's"]]}})


def test_runs_from_before_the_coupling_could_be_chosen_go_on(tmp_path):
    run = Run.create(tmp_path / "run", {"experiment": {"lr": 0.1}})
    run.must_be({"experiment": {"lr": 0.1, "coupling": "gradient"}})
    with pytest.raises(ValueError, match="coupling is gradient there and proximal here"):
        run.must_be({"experiment": {"lr": 0.1, "coupling": "proximal"}})


def test_foreign_directories_are_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not a run of wideflat"):
        Run.create(tmp_path, CONFIG)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Run.open(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere\. `wideflat train` makes runs"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no .*thesis\.txt; did you mean .*thesis\.tex\? `wideflat"):
        Run.open(tmp_path / "thesis.txt")
    with pytest.raises(ValueError, match="is not a run"):
        Run.create(tmp_path / "thesis.tex", CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_start_that_was_killed_at_once_does_not_block_the_directory(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.json.abc.part").write_text("{")
    Run.create(run, CONFIG)


def test_runs_of_a_later_version_and_damaged_ones_are_refused(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    (run.path / "config.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(RuntimeError, match="later version"):
        Run.open(run.path)
    (run.path / "config.json").write_text("{")
    with pytest.raises(DamagedState, match=r"config\.json is damaged"):
        Run.open(run.path)


def test_writing_needs_the_lock(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    for write in (lambda: run.append("metrics", {}), lambda: run.save_checkpoint(1, {}), run.restore):
        with pytest.raises(RuntimeError, match=r"run\.locked"):
            write()


# ---------------------------------------------------------------------------------------------- one process at a time


def _hold(path, ready):
    with Run.open(path).locked():
        ready.set()
        time.sleep(60)


def test_the_second_process_is_refused_and_told_who_holds_it_until_that_is_killed(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(run.path, ready))
    holder.start()
    try:
        assert ready.wait(60)
        with pytest.raises(RunInUse, match=rf"in use by process {holder.pid} on \S+ since 20\d\d-"), run.locked():
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.join(60)
        with run.locked():  # a lock does not outlive its process
            pass
    finally:
        holder.kill()
        holder.join(60)


def test_one_process_cannot_take_it_twice_either(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    with run.locked(), pytest.raises(RunInUse, match=f"process {os.getpid()}"), Run.open(run.path).locked():
        pass
    with run.locked():
        pass


# ---------------------------------------------------------------------------------------------- checkpoints


def filled(path, steps=(10, 20, 30)):
    run = Run.create(path, CONFIG)
    with run.locked():
        for step in steps:
            run.append("metrics", {"step": step})
            run.append("timing", {"seconds": step / 7})
            run.save_checkpoint(step, {"step": step, "weight": torch.full((50,), float(step))})
    return run


def test_two_states_are_kept_and_the_last_is_restored(tmp_path):
    run = filled(tmp_path / "run")
    assert sorted(path.name for path in (run.path / "checkpoints").glob("*.json")) == [
        "step-0000000020.json",
        "step-0000000030.json",
    ]
    with run.locked():
        run.append("metrics", {"step": 31})
        assert run.restore()["step"] == 30
    assert run.metrics() == [{"step": 10}, {"step": 20}, {"step": 30}]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_truncated_last_state_falls_back_to_the_one_before_and_says_so(tmp_path, suffix):
    run = filled(tmp_path / "run")
    last = run.path / "checkpoints" / f"step-0000000030{suffix}"
    last.write_bytes(last.read_bytes()[:100])
    with run.locked():
        with pytest.warns(UserWarning, match=rf"step-0000000030{suffix} is damaged.*falling back to the state before"):
            state = run.restore()
        assert state["step"] == 20
        assert run.metrics() == [{"step": 10}, {"step": 20}]
        run.save_checkpoint(30, {"step": 30})
        assert run.restore()["step"] == 30


def test_a_table_that_lost_lines_costs_these_lines_alone(tmp_path):
    run = filled(tmp_path / "run")
    os.truncate(run.path / "metrics.jsonl", len('{"step": 10}\n{"step": 20}\n'))
    said = []
    with run.locked():
        assert run.restore(said.append)["step"] == 30
        assert run.metrics() == [{"step": 10}, {"step": 20}]
        run.append("metrics", {"step": 40})
        run.save_checkpoint(40, {"step": 40})
        assert run.restore(said.append)["step"] == 40  # the lengths that states know are still true
    assert run.metrics() == [{"step": 10}, {"step": 20}, {"step": 40}]
    assert len(said) == 1 and "metrics.jsonl is damaged by the loss of 13 bytes; states are good" in said[0]


def test_nothing_whole_left_starts_again(tmp_path):
    run = filled(tmp_path / "run")
    for path in (run.path / "checkpoints").glob("*.json"):
        path.write_text("")
    said = []
    with run.locked():
        assert run.restore(said.append) is None
    assert len(said) == 2
    assert run.metrics() == []


def test_a_full_disk_leaves_the_last_good_state_and_says_so(tmp_path, monkeypatch):
    run = filled(tmp_path / "run")
    real = os.fsync

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with run.locked():
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"no space left on the disk of .*last good state is .*step-0000000030.*same"):
            run.save_checkpoint(40, {"step": 40, "weight": torch.ones(50)})
        with pytest.raises(OSError, match="no space left"):
            run.append("metrics", {"step": 40})  # may leave a line, or half of one
        monkeypatch.setattr(os, "fsync", real)
        assert run.restore()["step"] == 30
        assert run.metrics()[-1] == {"step": 30}
    assert not list(run.path.glob("**/*.part"))


def test_a_line_that_is_still_being_written_is_not_read(tmp_path):
    run = filled(tmp_path / "run")
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    assert run.metrics()[-1] == {"step": 30}


WRITER = """
import sys, torch
from wideflat.training.runs import Run
run = Run.open(sys.argv[1])
with run.locked():
    state = run.restore(lambda text: sys.exit(3))
    step = state["step"] if state else 0
    while True:
        step += 1
        run.append("metrics", {"step": step})
        run.save_checkpoint(step, {"step": step, "weight": torch.full((20_000,), float(step))})
        print(step, flush=True)
"""


def test_killing_a_writer_at_any_moment_leaves_a_whole_state(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    generator = torch.Generator().manual_seed(0)
    before = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(run.path)], stdout=subprocess.PIPE)
        try:
            assert int(process.stdout.readline()) == before + 1  # however busy the machine, something is written
            time.sleep(0.2 * torch.rand((), generator=generator).item())
        finally:
            process.kill()
            process.communicate()
        with run.locked(), warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing may look damaged
            state = run.restore()
        assert state["step"] > before
        assert torch.equal(state["weight"], torch.full((20_000,), float(state["step"])))
        assert run.metrics() == [{"step": step} for step in range(1, state["step"] + 1)]
        before = state["step"]


# ---------------------------------------------------------------------------------------------- models


def test_an_explorer_that_is_saved_as_the_result_is_warned_of(tmp_path):
    run, model = Run.create(tmp_path / "run", {}), torch.nn.Linear(2, 1)
    opt = wideflat.EntropySGD(model.parameters(), inner_steps=3)
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    with run.locked(), pytest.warns(UserWarning, match="explorer w' of EntropySGD"):
        run.save_model(model, {})
    opt.flush()
    with run.locked():
        run.save_model(model, {})  # warnings are errors here


def test_models_and_snapshots_are_found_and_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    from wideflat.presets import preset

    run = Run.create(tmp_path / "run", {"experiment": preset("cifar10-smallconvnet").to_dict(), "seed": 0})
    assert run.result() is None
    with pytest.raises(FileNotFoundError, match="does not have its final model yet"):
        run.load_model()
    model = run.build_model()
    with run.locked():
        run.save_model(model, {"epoch": 4}, epoch=4)
        path = run.save_model(model, {"test_error": 0.5})
    assert list(run.snapshots()) == [4]
    assert run.result() == {"test_error": 0.5}
    assert run.result(4) == {"epoch": 4}
    torch.testing.assert_close(load_file(path), dict(model.state_dict()), rtol=0, atol=0)
    for loaded in (Run.open(path).load_model(), run.load_model(epoch=4)):
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
        assert not loaded.training
    with pytest.raises(FileNotFoundError, match=r"snapshot at epoch 5 \(snapshots at epochs: 4\)"):
        run.load_model(epoch=5)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedState, match=r"model\.safetensors is damaged"):
        run.load_model()


def test_a_change_of_machine_is_said(tmp_path):
    run = Run.create(tmp_path / "run", CONFIG)
    with run.locked():
        run.record_environment()
        run.record_environment()
        row = json.loads((run.path / "environment.jsonl").read_text().splitlines()[0])
        (run.path / "environment.jsonl").write_text(json.dumps({**row, "torch": "0.4"}) + "\n")
        with pytest.warns(UserWarning, match=r"torch was 0\.4, is .*not bit for bit"):
            run.record_environment()


def test_a_folder_of_replicas_is_the_run_of_the_first_that_is_finished(tmp_path):
    config = {**CONFIG, "experiment": preset("cifar10-smallconvnet").to_dict()}
    runs = [Run.create(tmp_path / f"replica-{a}", config) for a in range(3)]
    assert Run.open(tmp_path).path == runs[0].path
    with runs[1].locked():
        runs[1].save_model(runs[1].build_model(), {"test_error": 0.5})
    assert Run.open(tmp_path).result() == {"test_error": 0.5}
    assert Run.open(tmp_path / "replica-2").path == runs[2].path
