"""No run of a sweep is lost: failures are reported and retried, what is done is never done again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from wideflat.experiments.sweep import Task, sweep
from wideflat.progress import Progress

#: Counts its starts in a file, fails as often as it is told to, then makes its file.
SCRIPT = """
import os, pathlib, signal, sys, time
done, how, times = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
count = done.with_suffix(".count")
starts = int(count.read_text()) if count.exists() else 0
count.write_text(str(starts + 1))
print("start", starts + 1, flush=True)
if starts < times:
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "nothing":
        sys.exit(0)
    if how == "hang":
        time.sleep(60)
done.touch()
"""


def make(folder, name, how="exit", times=0):
    done = folder / f"{name}.done"
    return Task(name, [sys.executable, "-S", "-c", SCRIPT, done, how, str(times)], done)


def starts(folder, name):
    path = folder / f"{name}.count"
    return int(path.read_text()) if path.exists() else 0


def test_failures_are_reported_and_retried_and_nothing_is_lost(tmp_path):
    tasks = [
        make(tmp_path, "good"),
        make(tmp_path, "once", "exit", 1),
        make(tmp_path, "killed", "kill", 1),
        make(tmp_path, "empty", "nothing", 1),
        make(tmp_path, "never", "exit", 99),
        make(tmp_path, "last"),
    ]
    said = []
    outcomes = sweep(tasks, tmp_path / "logs", workers=3, retries=1, progress=False, say=said.append)
    assert [outcome.name for outcome in outcomes] == [task.name for task in tasks]
    assert [outcome.state for outcome in outcomes] == ["done"] * 4 + ["failed", "done"]
    assert [outcome.attempts for outcome in outcomes] == [1, 2, 2, 2, 2, 1]
    assert outcomes[4].reason == "exit code 3"
    text = "\n".join(said)
    assert "once failed (exit code 3) and is started again" in text
    assert "killed failed (signal SIGKILL) and is started again" in text
    assert "it ended without making" in text and "never failed (exit code 3) and is given up; see" in text
    assert outcomes[4].log.read_text().count("start") == 2  # both attempts are in the log

    # Again: what is done stays done, what failed is tried again.
    outcomes = sweep(tasks, tmp_path / "logs", workers=3, retries=0, progress=False)
    assert [outcome.attempts for outcome in outcomes] == [0, 0, 0, 0, 1, 0]
    assert starts(tmp_path, "good") == 1 and starts(tmp_path, "never") == 3
    lines = [json.loads(line) for line in (tmp_path / "logs" / "sweep.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line["task"] == "never"] == [
        "started",
        "waiting",
        "started",
        "failed",
        "started",
        "failed",
    ]


#: Counts those that run with it; the first two wait for each other.
COUNTING = """
import pathlib, sys, time
done = pathlib.Path(sys.argv[1])
mine = done.with_suffix(".run")
mine.touch()
count = 0
for _ in range(3000):
    count = max(count, len(list(done.parent.glob("*.run"))))
    if count > 1 or done.stem not in ("0", "1"):
        break
    time.sleep(0.02)
time.sleep(0.2)
count = max(count, len(list(done.parent.glob("*.run"))))
mine.unlink()
done.write_text(str(count))
"""


def test_no_more_than_the_workers_run_at_once(tmp_path):
    files = [tmp_path / f"{i}.n" for i in range(6)]
    tasks = [Task(f"t{i}", [sys.executable, "-S", "-c", COUNTING, file], file) for i, file in enumerate(files)]
    sweep(tasks, tmp_path / "logs", workers=2, progress=False)
    assert max(int(file.read_text()) for file in files) == 2


def test_the_estimate_counts_what_this_sweep_has_done(tmp_path, monkeypatch):
    bars = []

    class Seen(Progress):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            bars.append(self)

    monkeypatch.setattr("wideflat.experiments.sweep.Progress", Seen)
    ended, resumed = make(tmp_path, "ended"), tmp_path / "resumed.done"
    ended.done.touch()
    status = tmp_path / "resumed.status"
    content = json.dumps({"description": "", "completed": 60, "before": 50, "total": 100, "figures": ""})
    script = f"import pathlib, time; pathlib.Path({str(status)!r}).write_text({content!r}); time.sleep(1.5); "
    script += f"pathlib.Path({str(resumed)!r}).touch()"
    going_on = Task("resumed", [sys.executable, "-S", "-c", script], resumed, status)
    sweep([ended, going_on], tmp_path / "logs", workers=1, progress=False)
    assert [bar.before for bar in bars] == [1.5]  # one whole task, and half of another
    assert [bar.completed for bar in bars] == [2]  # and it ends at the end


@pytest.mark.timeout(120)
def test_a_task_that_hangs_is_ended(tmp_path):
    task = make(tmp_path, "hangs", "hang", 1)
    (outcome,) = sweep([task], tmp_path / "logs", timeout=5.0, retries=1, progress=False)
    assert outcome.state == "done" and outcome.attempts == 2


def test_functions_are_called_in_processes_of_their_own(tmp_path):
    task = Task.call("tree", "os:makedirs", [str(tmp_path / "made")], done=tmp_path / "made")
    assert sweep([task], tmp_path / "logs", progress=False)[0].state == "done"


def test_trainings_are_tasks(tmp_path):
    task = Task.train("cifar10-smallconvnet", "--algorithm", "esgd", out=tmp_path / "run-1")
    assert task.name == "run-1" and task.done == tmp_path / "run-1" / "model.json"
    assert list(task.command)[1:6] == ["-m", "wideflat", "--quiet", "train", "cifar10-smallconvnet"]


def test_an_interrupted_sweep_stops_its_tasks_and_goes_on_later(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[3])\n"
        "from pathlib import Path\n"
        "from wideflat.experiments.sweep import Task, sweep\n"
        "folder, script = Path(sys.argv[1]), sys.argv[2]\n"
        "def make(name, how, times):\n"
        "    done = folder / (name + '.done')\n"
        "    return Task(name, [sys.executable, '-S', '-c', script, done, how, str(times)], done)\n"
        "tasks = [make('quick', 'exit', 0), make('slow', 'hang', 1), make('later', 'exit', 0)]\n"
        "sweep(tasks, folder / 'logs', workers=1, progress=False)\n"
    )
    root = str(__import__("pathlib").Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), SCRIPT, root], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while starts(tmp_path, "slow") < 1:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        # meanwhile the folder is taken
        with pytest.raises(RuntimeError, match="another sweep is using"):
            sweep([make(tmp_path, "other")], tmp_path / "logs", progress=False)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert b"KeyboardInterrupt" in errors
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "quick.done").exists() and not (tmp_path / "slow.done").exists()
    tasks = [make(tmp_path, "quick"), make(tmp_path, "slow", "hang", 1), make(tmp_path, "later")]
    outcomes = sweep(tasks, tmp_path / "logs", workers=1, progress=False)
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 0), ("done", 1), ("done", 1)]
    assert starts(tmp_path, "quick") == 1


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="workers must be >= 1, got 0"):
        sweep([], tmp_path, workers=0)
    with pytest.raises(ValueError, match="engine must be"):
        sweep([], tmp_path, engine="cloud")
    with pytest.raises(ValueError, match="every task needs a name of its own; several have a"):
        sweep([make(tmp_path, "a"), make(tmp_path, "a")], tmp_path)
    with pytest.raises(ValueError, match="the name of a task is a file name"):
        make(tmp_path, "a/b")


def test_slurm_without_submitit_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ModuleNotFoundError, match=r"wideflat\[sweep\]"):
        sweep([make(tmp_path, "a")], tmp_path / "logs", engine="slurm", progress=False)


def test_jobs_of_submitit_are_followed(tmp_path):
    """On submitit's local executor, which runs jobs as Slurm would, where it is installed."""
    pytest.importorskip("submitit", reason="needs submitit: pip install 'wideflat[sweep]'")
    os.environ.setdefault("USER", "tester")
    tasks = [make(tmp_path, "good"), make(tmp_path, "once", "exit", 1), make(tmp_path, "never", "kill", 99)]
    outcomes = sweep(tasks, tmp_path / "logs", engine="slurm", slurm={"cluster": "local"}, progress=False)
    assert [(o.state, o.attempts) for o in outcomes] == [("done", 1), ("done", 2), ("failed", 2)]
