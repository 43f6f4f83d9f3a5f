"""Every Python block of README and docs runs as it stands; the blocks of one document share their names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Lightning's own: it calls torch functions that torch 2.13 deprecates, and reports on loaders without workers.
# peft's: it asks transformers for a name that transformers has given up.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    names: dict = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        exec(compile("\n" * line + match.group(1), str(document), "exec"), names)
