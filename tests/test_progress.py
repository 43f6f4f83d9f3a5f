import sys

import pytest

from wideflat.progress import Progress, _duration


def test_plain_lines_say_how_far_and_how_long_still(capsys, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("wideflat.progress.time.monotonic", lambda: float(next(clock)))
    with Progress("sweep", total=4) as progress:
        for _ in range(4):
            progress.advance(loss=0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("sweep: ") and line.endswith("loss 0.5") for line in lines)
    assert "left" in lines[0] and "4/4" in lines[-1]
    assert len(lines) == len(set(lines))


def test_what_was_done_before_says_nothing_about_the_pace(capsys, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("wideflat.progress.time.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(Progress, "plain_interval", -1.0)
    with Progress("training", total=10, before=6) as progress:
        assert progress.completed == 6
        progress.update(6)
        progress.update(8)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("training: 6/10, ") and "left" not in lines[0]
    so_far = lines[1].split(", ")[2].removesuffix(" so far")
    assert lines[1] == f"training: 8/10, {so_far} left, {so_far} so far"  # 2 of 10 were done now, 2 are left


def test_quick_work_and_silent_work_write_nothing(capsys, monkeypatch):
    with Progress("quick", total=1) as progress:
        progress.advance()
    monkeypatch.setattr(Progress, "silent", True)
    monkeypatch.setattr(Progress, "plain_interval", -1.0)
    with Progress("silent", total=1) as progress:
        progress.advance()
    assert capsys.readouterr().err == ""


def test_durations():
    assert [_duration(5), _duration(65), _duration(3661)] == ["0:05", "1:05", "1:01:01"]


def test_parts_have_lines_of_their_own_until_they_end(capsys, monkeypatch):
    monkeypatch.setattr(Progress, "plain_interval", -1.0)
    with Progress("sweep", total=2) as progress:
        progress.part("first", 30, 40, "loss 0.5")
        progress.part("second", 0, None, "starting")
        progress.update(0.75)
        progress.end_part("first")
        progress.end_part("never")
        progress.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sweep: 0.75/2") and lines[1:3] == ["  first: 75 %  loss 0.5", "  second: 0  starting"]
    assert lines[3].startswith("sweep: 1/2") and lines[4:] == ["  second: 0  starting"]


def test_parts_on_a_terminal(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("sweep", total=2) as progress:
        progress.part("first", 30, 40, "loss 0.5")
        progress.part("second", 0, None, "starting")
        progress.part("first", 35, 40, "loss 0.4")
        assert [task.description for task in progress._bar.tasks] == ["sweep", "  first", "  second"]
        assert progress._bar.tasks[1].completed == 35 and progress._bar.tasks[1].fields["figures"] == "loss 0.4"
        progress.end_part("first")
        assert [task.description for task in progress._bar.tasks] == ["sweep", "  second"]


def test_another_process_can_read_how_far_the_work_is(tmp_path, monkeypatch):
    path = tmp_path / "status"
    assert Progress.read(path) is None
    monkeypatch.setattr(Progress, "report_to", path)
    with Progress("training", total=4, enabled=False) as progress:
        progress.update(1, loss=0.5)
        expected = {"description": "training", "completed": 1, "before": 0, "total": 4, "figures": "loss 0.5"}
        assert Progress.read(path) == expected
        progress.update(2)  # not more than once a second
        assert Progress.read(path)["completed"] == 1
        progress.update(4)  # but the end at once
        assert Progress.read(path)["completed"] == 4
    path.write_text("{")
    assert Progress.read(path) is None
