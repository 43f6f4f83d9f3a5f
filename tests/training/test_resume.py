"""Training that is killed, damaged, started twice: it ends like the undisturbed run, bit for bit."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wideflat.training.runs import Run

SCRIPT = Path(__file__).parent / "killed_training.py"
ALGORITHMS = ("sgd", "esgd", "rsgd", "parle")


def script(*arguments, **more):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


def done(process, timeout=280):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_killed_at_system_calls(tmp_path):
    """SIGKILL before or after a synchronise, rename, cut or removal: the moments that could leave a file broken."""
    results = done(script("kill", tmp_path, ",".join(ALGORITHMS), "write", 3, 0))
    assert list(results) == list(ALGORITHMS)
    for result in results.values():
        assert result["kills"] == 3 and result["finished"] >= 1
    assert sum(result["resumed"] for result in results.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["time", "write"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_killed_at_20_random_moments(tmp_path, algorithm, mode):
    """SIGKILL from outside at a random time, or at a random system call, twenty times."""
    result = done(script("kill", tmp_path, algorithm, mode, 20, 1))[algorithm]
    print(result)
    assert result["kills"] == 20 and result["resumed"] > 0


def test_truncated_last_checkpoint(tmp_path):
    """The run goes on from the state before the damaged one, says so, and ends the same."""
    for result in done(script("damage", tmp_path, "esgd,rsgd")).values():
        assert "step-" in result["said"] and "is damaged" in result["said"]
        assert "falling back to the state before it" in result["said"]
        assert result["resumed_before_the_damaged_state"]


def test_two_runs_on_one_directory(tmp_path):
    """The second one refuses and says who holds it; the first one is not disturbed."""
    first = script("long", tmp_path / "run")
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert first.poll() is None, first.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = script("long", tmp_path / "run")
        _, message = second.communicate(timeout=120)
        assert second.returncode != 0
        assert f"is in use by process {first.pid} on " in message
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    run = Run.open(tmp_path / "run")
    with run.locked():  # nothing is left of the lock, and the state is whole
        assert run.restore()["step"] > 0
