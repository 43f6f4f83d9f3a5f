"""The lowest versions that pyproject.toml promises, installed and tested.

    python tools/lowest_versions.py [--torch VERSION] [--folder FOLDER] [--only-install] [TESTS ...]

Makes an environment outside the repository with exactly the lower bound of every dependency of the package and of its
extras ``experiments`` and ``pgdl``, and runs the tests there (by default of everything that uses them). torch is the
one of constraints.txt, or with ``--torch lowest`` the lowest too: a build with 3 GB of CUDA packages. What the tests
themselves are run with has its newest version.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("experiments", "pgdl")
#: Run the tests, and are no dependency of the package.
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pandas")
TESTS = ("commands", "report", "experiments", "data", "training", "committee", "presets", "cards", "models")


def lowest(requirement: str) -> str:
    """A requirement at its lower bound.

    Example:
        >>> lowest("numpy>=1.26")
        'numpy==1.26'
    """
    name, bound = re.fullmatch(r"([\w-]+)>=([\w.]+)", requirement).groups()  # type: ignore[union-attr]
    return f"{name}=={bound}"


def requirements(project: dict, torch: str | None = None) -> list[str]:
    """All of them at their lower bounds; torch only where another one than that of constraints.txt is wanted.

    Example:
        >>> project = {"dependencies": ["torch>=2.6", "numpy>=1.26"]}
        >>> project["optional-dependencies"] = dict.fromkeys(EXTRAS, [])
        >>> requirements(project), requirements(project, "lowest"), requirements(project, "2.9.1")
        (['torch', 'numpy==1.26'], ['torch==2.6', 'numpy==1.26'], ['torch==2.9.1', 'numpy==1.26'])
    """
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    wanted = {None: "torch", "lowest": lowest(asked[0])}.get(torch, f"torch=={torch}")
    return [wanted, *(lowest(line) for line in asked[1:])]


def main() -> None:
    """Install, say what is there, test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=[f"tests/{name}" for name in TESTS])
    parser.add_argument("--torch", help="this version, or `lowest`, in place of that of constraints.txt")
    parser.add_argument("--folder", type=Path, help="of the environment; kept")
    parser.add_argument("--only-install", action="store_true")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch=")]
        (folder / "constraints.txt").write_text("\n".join(kept))
        limits = folder / "constraints.txt" if options.torch else ROOT / "constraints.txt"
        install = [python, "-m", "pip", "install", "-q", "-c", str(limits)]
        wanted = requirements(project, options.torch)
        print("lowest:", *wanted, flush=True)
        subprocess.run([*install, *wanted, *TOOLS], check=True)
        subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
        if not options.only_install:
            command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", *options.tests]
            sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
