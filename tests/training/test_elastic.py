"""Replicas in jobs of their own, of which one is killed."""

import json
import os
import sys
from pathlib import Path

import pytest

from wideflat.training import Run
from wideflat.training.elastic import supervise

JOB = Path(__file__).with_name("training_job.py")


@pytest.mark.slow
def test_jobs_that_die_are_started_again(tmp_path):
    pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft: pip install 'wideflat[distributed]'")
    said = []
    killed = []
    environment_before = dict(os.environ)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def say(message):
        said.append(message)

    def command(index, lighthouse):
        if index == 1 and not killed:  # kills itself after a while: a wrapper that sends SIGKILL
            killed.append(True)
            code = (
                "import os, signal, threading, runpy, sys, pathlib\n"
                f"path = pathlib.Path({str(tmp_path)!r}) / 'replica-1' / 'metrics.jsonl'\n"
                "def watch():\n"
                "    import time\n"
                "    while not path.exists() or len(path.read_text().splitlines()) < 3: time.sleep(0.02)\n"
                "    os.kill(os.getpid(), signal.SIGKILL)\n"
                "threading.Thread(target=watch, daemon=True).start()\n"
                f"sys.argv = [{str(JOB)!r}, {str(tmp_path)!r}, '1', {lighthouse!r}]\n"
                f"runpy.run_path({str(JOB)!r}, run_name='__main__')\n"
            )
            return [sys.executable, "-c", code]
        return [sys.executable, str(JOB), str(tmp_path), str(index), lighthouse]

    try:
        assert supervise(command, 2, say=say) == 0
    finally:
        os.environ.clear()
        os.environ.update(environment_before)
    assert said == ["replica 1 has died (signal 9) and is started again"]
    results = [Run.open(tmp_path / f"replica-{a}").result() for a in (0, 1)]
    assert results[0]["epoch"] == results[1]["epoch"] == 40
    assert results[0]["test_error"] == results[1]["test_error"] < 0.5
    events = [line["event"] for line in Run.open(tmp_path / "replica-0").metrics("events")]
    assert any("replica 1 has gone" in event for event in events)
    alive = [row["alive"] for row in Run.open(tmp_path / "replica-0").metrics()]
    assert [0] in alive and alive[0] == [0, 1]
    json.dumps(results)


def test_a_job_that_fails_by_itself_again_and_again_is_given_up():
    """Data that is not there, or a divergence: to start it a hundred times would not help."""
    pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    said, started = [], []

    def command(index, lighthouse):
        started.append(index)
        code = 0 if index else 1
        return [sys.executable, "-S", "-c", f"import sys; sys.exit({code})"]

    assert supervise(command, 2, lighthouse="http://127.0.0.1:1", say=said.append) == 1
    assert started.count(0) == 3 and started.count(1) == 1
    assert said[-1] == "replica 0 has failed 3 times in a row (exit code 1) and is not started again: it said why"
