"""The notebook in docs/ runs from the first cell to the last, and shows what it says."""

import ast
import json
import warnings
from pathlib import Path

PATH = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


def run(source, names):
    """Execute a cell; returns what a notebook would show of its last line."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(PATH), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), str(PATH), "eval"), names)


def test_runs_and_shows_tables_with_figures(monkeypatch, tmp_path):
    matplotlib = __import__("matplotlib")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    content = json.loads(PATH.read_text())
    names, shown = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of profiles that may turn out not to be comparable
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"]).replace("steps=150", "steps=40")
                shown.append(run(source.replace(".compare(profiles", ".compare(force=True, other=profiles"), names))
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(pages) == 2 and all("<table>" in page and "data:image/png" in page for page in pages)
    assert "EntropySGD around SGD, at its center" in repr(shown[1])
    assert [text.get_text() for text in names["ax"].get_legend().get_texts()] == ["SGD", "eSGD"]
    assert set(shown[-1]) == {"SGD", "eSGD"}


def test_is_committed_without_outputs():
    cells = json.loads(PATH.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
