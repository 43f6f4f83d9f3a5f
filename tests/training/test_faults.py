"""Trainings under schedules of faults end as undisturbed: every algorithm, alone, on ranks, among jobs."""

import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest

from wideflat.algorithms import ALGORITHMS

SCRIPT = Path(__file__).parent / "faulty_training.py"
#: Every algorithm in every company that it can be in.
TRAININGS = [
    (company, name)
    for company in ("alone", "ranks", "elastic")
    for name, algorithm in ALGORITHMS.items()
    if company != "elastic" or algorithm.elastic
]


def try_schedules(folder, company, algorithm, seeds, timeout):
    if company == "elastic":
        pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    command = [sys.executable, str(SCRIPT), str(folder), company, algorithm, *map(str, seeds)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as undisturbed") == len(seeds)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("company", "algorithm"), [("alone", "esgd"), ("ranks", "rsgd"), ("elastic", "rsgd")])
def test_a_training_under_a_schedule_of_faults_ends_as_undisturbed(tmp_path, company, algorithm):
    try_schedules(tmp_path, company, algorithm, [8], 380)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("company", "algorithm"), TRAININGS)
def test_thirty_schedules_end_as_undisturbed(tmp_path, company, algorithm):
    try_schedules(tmp_path, company, algorithm, range(100, 130), 7000)


def test_a_seed_is_a_schedule():
    assert faults.draw(3, "alone", 1, 100) == faults.draw(3, "alone", 1, 100) != faults.draw(4, "alone", 1, 100)
    met = {
        kinds[fault.choice % len(kinds)]
        for seed in range(200)
        for life in faults.draw(seed, "ranks", 2, 100)
        for fault in life
        for kinds in faults.KINDS.values()
    }
    assert met == set().union(*faults.KINDS.values())


@pytest.mark.parametrize("kind", ["torn", "failing", "kill after", "lost", "full"])
def test_faults_do_what_they_say(tmp_path, kind):
    """A file that is written, synchronised and renamed; what is left of it, and of the one before it."""
    call = {"torn": "fsync", "failing": "fsync", "kill after": "fsync"}.get(kind, "replace")
    target = tmp_path / "file"
    target.write_text("before")
    choice = faults.KINDS[call].index(kind)
    code = (
        "import os, faults, sys\n"
        f"disk = faults.Disk([faults.Fault(0, {2 if call == 'fsync' else 3}, {choice}, 0.5)], {str(tmp_path)!r})\n"
        "disk.install()\n"
        f"file = open({str(tmp_path / 'part')!r}, 'w')\n"
        "file.write('0123456789'); file.flush(); os.fsync(file.fileno())\n"
        f"os.replace({str(tmp_path / 'part')!r}, {str(target)!r}); os.unlink({str(tmp_path / 'other')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert target.read_text() == "before"
    left = {"torn": "01234", "failing": "0123456789", "kill after": "0123456789", "full": "0123456789"}
    assert kind == "lost" or (tmp_path / "part").read_text() == left[kind]
    words = {"failing": "Input/output error", "full": "No space left on device"}
    assert words[kind] in done.stderr if kind in words else done.returncode == -9
