"""The package as a stranger gets it: a wheel in an empty environment, far from the repository.

    python tools/check_wheel.py [--keep FOLDER]

Builds wheel and sdist, looks at their sizes and content, installs the wheel with the extra for the command line into a
new environment, and runs there, in another folder, the Python blocks of README.md and `wideflat demo`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What a wheel with the compiled loops of one platform may have.
MOST_BYTES = 1_000_000
NEEDED = ("wideflat/py.typed", "wideflat/kernels/entropy_sgd.c", "wideflat/data/dress_coat.npy")


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command; what it prints is seen."""
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, check=True)


def build(folder: Path) -> Path:
    """Wheel and sdist, checked; returns the wheel."""
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {sdist.name}: {sdist.stat().st_size:,} bytes")
    assert wheel.stat().st_size < MOST_BYTES, f"the wheel must be smaller than {MOST_BYTES:,} bytes"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert all(name in names for name in NEEDED), f"missing in the wheel: {set(NEEDED) - set(names)}"
    with tarfile.open(sdist) as source:
        unwanted = [name for name in source.getnames() if "/results/" in name or name.endswith(".png")]
    assert not unwanted, f"the sdist has results or figures: {unwanted[:3]}"
    return wheel


def main() -> None:
    """Build, install, use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="work here, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = build(folder)
        venv.create(folder / "env", with_pip=True)
        binaries = folder / "env" / "bin"
        constraints = ("-c", str(ROOT / "constraints.txt"))
        run(binaries / "pip", "install", "-q", *constraints, f"{wheel}[experiments]", cwd=folder)
        blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
        (folder / "readme.py").write_text("\n".join(blocks))
        run(binaries / "python", "readme.py", cwd=folder)
        run(binaries / "wideflat", "-q", "demo", cwd=folder)


if __name__ == "__main__":
    main()
