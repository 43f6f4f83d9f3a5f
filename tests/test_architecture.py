"""The house is as docs/architecture.md says: who imports whom, read from the import statements."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "wideflat"
DOORS = {"__init__", "__main__"}  # see everything


def layers():
    """The place of each module of the root and of each room, from the document's table: layer, then order in it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) [^|]*\| ([^|]*) \|", text, re.MULTILINE)
    return {name: (int(layer), k) for layer, names in rows for k, name in enumerate(re.findall(r"`(\w+)`", names))}


def statements(tree):
    """All nodes of a file, but for what is there for types alone: annotations may name what is above."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from statements(node)


def imports(path):
    """The modules of the package that a file imports, wherever in it, with the line."""
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "wideflat" and len(parts) > 1:
                yield parts[1], name, node.lineno


def room(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room(path) not in DOORS)


def test_the_document_names_every_room_and_nothing_else():
    there = {room(path) for path in FILES}
    assert set(layers()) == there


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_goes_up_or_sideways(path):
    layer, here = layers(), room(path)
    public = {p.stem for p in PACKAGE.iterdir()}
    for there, name, line in imports(path):
        if there not in public:  # a public name of the package, which sees everything
            raise AssertionError(f"{path.relative_to(ROOT)}:{line} imports {name} from the front door")
        if there != here:
            assert layer[there] < layer[here], (
                f"{path.relative_to(ROOT)}:{line}: {here} (layer {layer[here]}) imports {name} (layer {layer[there]})"
            )


def test_the_graph_of_modules_has_no_cycle():
    """Also not one that is hidden in functions."""
    graph = {}
    names = {".".join(("wideflat", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    for name, path in names.items():
        targets = set()
        for _, target, _ in imports(path):
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != name:
                targets.add(target)
        graph[name] = targets
    done, way = set(), []

    def visit(name):
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name in done:
            return
        way.append(name)
        for target in sorted(graph[name]):
            visit(target)
        way.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_no_private_name_goes_through_a_wall():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wideflat"):
                private = [a.name for a in node.names if a.name.startswith("_") and not a.name.startswith("__")]
                assert not private, f"{path.relative_to(ROOT)}:{node.lineno} imports {private}"


def test_no_name_is_a_module_and_a_function_of_its_room():
    for init in [*PACKAGE.glob("*/__init__.py")]:
        modules = {path.stem for path in init.parent.glob("*.py")}
        for node in ast.parse(init.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert not modules & {alias.asname or alias.name for alias in node.names}, init


def test_the_drawing_is_that_of_the_table():
    spec = importlib.util.spec_from_file_location("draw_house", ROOT / "tools" / "draw_house.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.DRAWING.read_text() == tool.drawing(tool.PAGE.read_text()), "run python tools/draw_house.py"


#: Modules that are tested elsewhere, and where: by the clients they are for, as an oracle, by what is made of them.
TESTED_ELSEWHERE = {
    "clients/test_lightning.py": "integrations/lightning",
    "clients/test_lightning_watched.py": "checks/trainers",
    "clients/test_trainer.py": "integrations/huggingface",
    "committee/test_training.py": "reference",
    "distributed/test_sharded.py": "kernels/shards",
    "volume/test_walks.py": "integration",
}
#: Tests of a room as a whole, of how its parts work together, or of what no module is.
OF_A_ROOM = {
    "baselines/test_diloco_on_ranks.py", "baselines/test_family.py",
    "baselines/test_sam_family.py", "baselines/test_sam_on_ranks.py", "checks/test_checks.py",
    "distributed/test_sharded.py", "energy/test_antithetic.py", "energy/test_no_surprises.py", "energy/test_zoo.py",
    "volume/test_gates.py",
    "experiments/pgdl/test_pgdl.py", "kernels/test_sanitizers.py", "models/test_models.py",
    "report/test_page_in_browser.py", "training/test_divergence.py", "training/test_earlier_versions.py",
    "training/test_faults.py", "training/test_matrix.py", "training/test_no_code_in_files.py",
    "training/test_resume.py", "training/test_starts.py",
}  # fmt: skip
TESTS = ROOT / "tests"
ROOMS = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}


def mirror(path):
    """Where the tests of a module are looked for first."""
    return TESTS / path.relative_to(PACKAGE).with_name(f"test_{path.stem}.py")


def elsewhere():
    """The modules that have no tests of their own, and the file that tests each."""
    for test, names in TESTED_ELSEWHERE.items():
        for name in names.split():
            beside = PACKAGE / Path(test).parent / f"{name}.py"
            yield beside if beside.exists() else PACKAGE / f"{name}.py", TESTS / test


def test_every_module_is_tested_at_its_own_path_or_where_the_list_says():
    missing = {path for path in FILES if path.stem not in DOORS and not mirror(path).exists()}
    listed = dict(elsewhere())
    assert set(listed) == missing, f"give it tests at its path, or say where they are: {set(listed) ^ missing}"
    assert all(test.exists() for test in listed.values())


def test_every_test_in_a_room_is_that_of_a_module_or_of_the_room():
    mirrors = {mirror(path) for path in FILES}
    in_rooms = {path for room in ROOMS for path in (TESTS / room).rglob("test_*.py")}
    others = {str(path.relative_to(TESTS)) for path in in_rooms - mirrors}
    assert others == OF_A_ROOM, f"name it after its module, or say that it is of the room: {others ^ OF_A_ROOM}"
