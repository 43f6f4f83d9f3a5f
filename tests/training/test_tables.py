"""Logs never stop a run: damaged lines are set aside, and the training goes on from its states."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_trainings import QUIET, images, small
from torch.distributed.device_mesh import init_device_mesh

from wideflat.training import Interrupted, Options, Run, train, train_in
from wideflat.training.elastic import Elastic
from wideflat.training.ranks import Ranks
from wideflat.training.tables import append_row, mend_table, read_table

TABLES = ("metrics", "timing", "events", "environment")
EXPERIMENT, DATA, OPTIONS = small("sgd", epochs=3), images(32, 16), Options(batch_norm_images=32)


def stop_after(epoch):
    def on_epoch(training, row):
        if row["epoch"] == epoch:
            raise Interrupted("stopped by the test")

    return on_epoch


def a_bad_byte(content):
    middle = content.index(b"\n") // 2
    return content[:middle] + b"\xff" + content[middle + 1 :]


DAMAGES = {
    "a bad byte": a_bad_byte,
    "a byte more": lambda content: content[:5] + b"\x00" + content[5:],
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "nothing of ours": lambda content: b"[3]\n" * 3 + b"[" * 5000,
}


def spoil(out, damage):
    """Damage all tables of a run."""
    for table in TABLES:
        path = out / f"{table}.jsonl"
        path.write_bytes(DAMAGES[damage](path.read_bytes()))


def must_have_gone_on(run, whole, said):
    """From the last state, not from the start, to the same end; each damage was said once, and is mended."""
    assert any("resumed" in text and "epoch 2.00 of 3" in text for text in said)
    expected = whole.load_model().state_dict()
    torch.testing.assert_close(run.load_model().state_dict(), expected, rtol=0, atol=0)
    for table in TABLES:
        assert sum(f"{table}.jsonl is damaged" in text for text in said) <= 1
        assert all(isinstance(row, dict) for row in run.metrics(table))  # and no warning
    assert run.metrics()[-1] == whole.metrics()[-1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed training."""
    return train(EXPERIMENT, tmp_path_factory.mktemp("whole") / "run", DATA, OPTIONS, **QUIET)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_training_goes_on_to_the_same_end(tmp_path, whole, damage):
    out = tmp_path / "damaged"
    with pytest.raises(Interrupted):
        train(EXPERIMENT, out, DATA, OPTIONS, on_epoch=stop_after(3), **QUIET)
    spoil(out, damage)
    said = []
    run = train(EXPERIMENT, out, DATA, OPTIONS, say=said.append, **QUIET)
    must_have_gone_on(run, whole, said)


def train_in_company(company, out, said, **how):
    """Two replicas, three epochs."""
    experiment = small("rsgd", epochs=3, num_replicas=2, period=2)
    with company:
        return train_in(company, experiment, out, DATA, OPTIONS, say=said.append, **QUIET, **how)


def train_damaged(make, own, out, damages):
    """The undisturbed training, and one for each damage to the tables in its midst; what was said by each."""
    told = {}
    train_in_company(make(), f"{out}/whole", [])
    for damage in damages:
        dist.barrier()
        with pytest.raises(Interrupted):
            train_in_company(make(), f"{out}/{damage}", [], on_epoch=stop_after(3))
        dist.barrier()
        for run in own(Path(out) / damage):
            spoil(run, damage)
        dist.barrier()
        told[damage] = []
        train_in_company(make(), f"{out}/{damage}", told[damage])
    return told


def train_damaged_on_ranks(out, damages):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "dp"))
    return train_damaged(lambda: Ranks(mesh), lambda run: [run] if dist.get_rank() == 0 else [], out, damages)


def train_damaged_as_jobs(lighthouse, out, damages):
    rank = dist.get_rank()
    return train_damaged(
        lambda: Elastic(rank, lighthouse, "127.0.0.1"), lambda run: [run / f"replica-{rank}"], out, damages
    )


EVERY_DAMAGE = pytest.mark.parametrize(
    "damages", [["a bad byte"], pytest.param(list(DAMAGES), marks=pytest.mark.slow)], ids=["one", "all"]
)


@EVERY_DAMAGE
def test_ranks_go_on_to_the_same_end(ranks, tmp_path, damages):
    told, others = ranks(train_damaged_on_ranks, 2, str(tmp_path), damages, timeout=200.0)
    for damage in damages:
        must_have_gone_on(Run.open(tmp_path / damage), Run.open(tmp_path / "whole"), told[damage])
        assert not others[damage]


@EVERY_DAMAGE
def test_jobs_that_come_and_go_do_so_too(ranks, lighthouse, tmp_path, damages):
    found = ranks(train_damaged_as_jobs, 2, lighthouse, str(tmp_path), damages, timeout=300.0)
    for damage in damages:
        for a, told in enumerate(found):
            run, whole = (Run.open(tmp_path / name / f"replica-{a}") for name in (damage, "whole"))
            must_have_gone_on(run, whole, told[damage])


def test_what_is_set_aside_is_kept_as_it_was_and_said_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for epoch in range(3):
        append_row(path, {"epoch": epoch})
    size = path.stat().st_size
    path.write_bytes(path.read_bytes().replace(b'{"epoch": 1}', b'{"epo\xffh": 1}'))
    assert "metrics.jsonl is damaged in 1 line, kept in metrics.damaged" in mend_table(path, size)
    assert (tmp_path / "metrics.damaged").read_bytes() == b'{"epo\xffh": 1}\n'
    assert path.stat().st_size == size and read_table(path) == ([{"epoch": 0}, {"epoch": 2}], 0)
    assert mend_table(path, size) is None


def test_cutting_a_whole_table_says_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_row(path, {"epoch": 0})
    size = path.stat().st_size
    append_row(path, {"epoch": 1})
    assert mend_table(path, size) is None
    assert read_table(path) == ([{"epoch": 0}], 0) and not path.with_suffix(".damaged").exists()
    assert mend_table(tmp_path / "none.jsonl", 0) is None and not (tmp_path / "none.jsonl").exists()


def test_a_row_after_a_line_that_was_cut_short_is_a_row(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"event": "sto')
    append_row(path, {"event": "resumed"})
    assert read_table(path) == ([{"event": "resumed"}], 1)


def test_reading_alone_leaves_damaged_lines_out_with_a_warning(tmp_path):
    run = Run.create(tmp_path, {})
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\n" + json.dumps({"epoch": 1}).encode() + b"\n")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: 1 damaged line left out"):
        assert run.metrics() == [{"epoch": 1}]
