import os
import signal
import sys
import time

import pytest

from wideflat.experiments.engines import END_WITH_SWEEP, Processes, cores


def ended(job):
    deadline = time.monotonic() + 60
    while job.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return job.poll()


def test_processes_share_the_threads_and_have_environments_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    engine = Processes(3, [{"CARD": "0"}, {"CARD": "1"}])
    code = f"import os, sys; print(*(os.environ[n] for n in ('OMP_NUM_THREADS', 'CARD', {END_WITH_SWEEP!r})))"
    for slot in range(3):
        assert ended(engine.start([sys.executable, "-S", "-c", code], tmp_path / "log", slot)) == 0
    assert (tmp_path / "log").read_text().splitlines() == ["2 0 1", "2 1 1", "2 0 1"]  # appended, cards in turn
    assert Processes(100).threads == 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert Processes(1).threads == cores()


@pytest.mark.parametrize(("deaf", "code"), [(False, 3), (True, -signal.SIGKILL)])
def test_a_process_is_asked_before_it_is_ended(tmp_path, deaf, code):
    handler = "signal.SIG_IGN" if deaf else "lambda *_: sys.exit(3)"
    program = (
        f"import signal, sys, time; signal.signal(signal.SIGTERM, {handler}); print('up', flush=True); time.sleep(60)"
    )
    job = Processes(1).start([sys.executable, "-S", "-c", program], tmp_path / "log", 0)
    deadline = time.monotonic() + 60
    while "up" not in (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert job.poll() is None
    job.stop(patience=0.3 if deaf else 30.0)
    assert job.poll() == code
    job.ask()  # of one that has ended: nothing happens
    with pytest.raises(ProcessLookupError):
        os.killpg(int(job.name.removeprefix("process ")), 0)
