import html
import json

import pytest
import torch

import wideflat
from wideflat import cli
from wideflat.commands import demo as command
from wideflat.experiments import demo
from wideflat.experiments.demo import ONE_LINE, OPTIMIZERS, Demo


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The demo on very little: every step of it, in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "IMAGES", 60)
        patch.setattr(demo, "VOLUME_IMAGES", 4)
        said = []
        found = Demo(tmp_path_factory.mktemp("demo"), seeds=1, restarts=1, steps=3, say=said.append)
        work = found.committee.work
        work.cases, work.size, work.deltas = work.cases[:1], 20, (0.1, 1.0)
        found.compute()
        again = []
        found.say = again.append
        found.compute()  # everything is there
        yield found, said, again


def test_says_at_each_moment_which_of_how_many_steps_runs(small):
    _, said, again = small
    assert [line.split(":")[0] for line in said] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    assert [line.split(":")[0] for line in again] == ["step 1 of 1"]


def test_the_page_begins_with_the_finding(small):
    found, _, _ = small
    text = found.write_report().read_text()
    sentence, about = found.finding()
    heading = html.escape(sentence).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
    parts = (f"<h1>{heading}</h1>", '<p class="about">wideflat demo: ', html.escape(about), "What was asked")
    assert sorted(parts, key=text.index) == list(parts)
    for part in ("SmallConvNet", "wideflat.EntropySGD(model.parameters()", "Free entropy", "committee machine"):
        assert part in text
    assert len(found.networks) == 2 and set(found.networks["converged"]) <= {0.0, 1.0}
    assert "sgd-fast" not in text.split("Where restarts.csv comes from")[0]  # one name of each optimizer
    assert "measures how flat a minimum is" in text.split("A deep network, one line different")[1]


def test_json_is_one_object_with_numbers_as_numbers(small, monkeypatch, capfd):
    found, _, _ = small
    monkeypatch.setattr(command, "Demo", lambda *_, **__: found)
    monkeypatch.setattr(found, "compute", lambda: print("on the way"))
    assert cli.main(["demo", "--json"]) == 0
    record = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)
    assert (record["finding"], record["about"]) == found.finding() and record["committee"]["item"] == "fig1"
    for row in (*record["networks"], *record["committee"]["rows"]):
        words = {name for name, value in row.items() if not isinstance(value, (int, float)) and value is not None}
        assert words <= {"algorithm", "draw", "setting"}


def test_what_is_printed_is_what_is_run():
    model = torch.nn.Linear(2, 2)
    for name, line in ONE_LINE.items():
        names = {"torch": torch, "wideflat": wideflat, "model": model}
        exec(line, names)
        run = OPTIMIZERS[name](model.parameters())
        printed, used = ({k: v for k, v in opt.param_groups[0].items() if k != "params"} for opt in (names["opt"], run))
        assert type(names["opt"]) is type(run) and printed == used
