"""What a cell shows: a table and a figure, and never pages of tensors."""

import math
import sys

import pytest
import torch
from torch import nn

import wideflat
from wideflat.committee import SETTINGS, train
from wideflat.notebook import NotebookBar
from wideflat.progress import Progress

X = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, 1.0], [-1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
Y = torch.tensor([1.0, 1.0, -1.0, -1.0])


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    data = torch.randn(40, 4), torch.randint(3, (40,))
    solutions = train(
        SETTINGS["sgd-fast"].replace(hidden=3, batch_size=2, lr=1e-3), X, Y, seeds=range(2), progress=False
    )
    return {
        "profile": wideflat.local_energy(model, data, [0.0, 0.3], progress=False),
        "curve": wideflat.local_entropy(solutions.weights, X, Y, deltas=[0.1, 0.5]),
        "solutions": solutions,
        "volume": wideflat.free_entropy(model, data, [0.1], quick=True, progress=False),
        "shift": wideflat.shift_profile(model, data, quantize=[8, 4]),
        "spectrum": wideflat.spectrum(model, data, probes=2, steps=4, progress=False),
        "slice": wideflat.slices(model, data, positions=[-1.0, 0.0, 1.0], progress=False),
    }


@pytest.mark.parametrize("name", ["profile", "curve", "solutions", "volume", "shift", "spectrum", "slice"])
def test_a_cell_shows_a_table_with_a_figure_and_the_terminal_the_table(results, name):
    result = results[name]
    page = result._repr_html_()
    assert page.count("<table>") == 1 and page.count("data:image/png;base64,") == 1
    assert page.count("<tr>") == 1 + len(next(iter(result._columns().values())))
    assert repr(result) == str(result) and len(repr(result)) < 2500
    assert "tensor(" not in repr(result) and "array(" not in repr(result)


@pytest.mark.parametrize("name", ["profile", "curve", "solutions", "volume", "shift", "spectrum", "slice"])
def test_to_pandas_has_every_row(results, name):
    pandas = pytest.importorskip("pandas")
    frame = results[name].to_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == list(results[name]._columns())
    assert len(frame) >= 1


def test_without_pandas_and_matplotlib_it_says_what_to_install(results, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        results["profile"].to_pandas()
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        results["profile"].plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "<table>" in results["profile"]._repr_html_()  # the table is there all the same


def test_sigmas_of_a_float32_tensor_are_what_was_meant():
    profile = wideflat.local_energy(
        nn.Linear(2, 2), (torch.ones(4, 2), torch.zeros(4).long()), torch.linspace(0, 0.5, 6), progress=False
    )
    assert profile.sigmas.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_large_error_is_remarked_upon():
    large = wideflat.LocalEnergy([0.5], [0.1], [0.01], baseline=0.5)
    small = wideflat.LocalEnergy([0.5], [0.1], [0.01], baseline=0.02)
    assert "50 %: flatness says something" in str(large) and "flatness says" not in str(small)


def test_plot_draws_several_with_a_legend_and_warns_where_they_do_not_compare():
    figure = pytest.importorskip("matplotlib.figure")
    first = wideflat.LocalEnergy([0.0, 0.5], [0.0, 0.1], [0.0, 0.01], baseline=0.02)
    other = wideflat.LocalEnergy([0.0, 0.5], [0.0, 0.2], [0.0, 0.01], baseline=0.5)
    axes = lambda: figure.Figure().add_subplot()  # noqa: E731
    ax = wideflat.plot(first, first, labels=["a", "b"], ax=axes())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    with pytest.warns(UserWarning, match="not comparable") as caught:
        wideflat.plot(first, eSGD=other, ax=axes())
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match="of one kind"):
        wideflat.plot(first, 3)
    with pytest.raises(ValueError, match="labels must name each"):
        wideflat.plot(first, labels=["a", "b"])
    with pytest.raises(ValueError, match="at least one"):
        wideflat.plot()


def test_settings_are_in_the_representations():
    model = nn.Linear(2, 2)
    opt = wideflat.EntropySGD(model.parameters())
    assert "EntropySGD around SGD, at its center" in repr(opt) and "inner_lr=0.02" in repr(opt)
    assert "momentum=0.9, nesterov=True" in repr(opt)
    adam = repr(wideflat.EntropySGD(model.parameters(), inner=torch.optim.Adam, gamma=0.0))
    assert "around Adam" in adam
    focusing = wideflat.Focusing(opt, factor=10.0, total=5)
    focusing.step()
    assert repr(focusing).startswith("Focusing(EntropySGD, kind='exponential', factor=10, total=5") and "at 1" in repr(
        focusing
    )


def test_progress_in_a_notebook_is_one_bar_that_moves(monkeypatch):
    drawn = []
    bar = NotebookBar(lambda text, handle: drawn.append(text) or "handle")
    bar.interval = -math.inf  # every change is drawn
    monkeypatch.setattr(NotebookBar, "here", classmethod(lambda cls: bar))
    with Progress("a <sweep>", total=4) as progress:
        for _ in range(4):
            progress.advance(loss=0.5)
    assert 'a &lt;sweep&gt; <progress value="2" max="4"></progress> 2/4' in drawn[1] and "left" in drawn[1]
    assert "4/4" in drawn[-1] and "loss 0.5" in drawn[-1] and "left" not in drawn[-1]


def test_there_is_no_bar_where_there_is_no_notebook():
    assert NotebookBar.here() is None
