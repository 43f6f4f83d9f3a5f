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
