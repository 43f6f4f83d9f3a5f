"""Two versions of wideflat side by side: every command on small settings, weights and tables compared number by number.

    git archive COMMIT | tar -x -C OLD
    python tools/side_by_side.py OLD [NEW] [--only train,committee] [--keep FOLDER]

OLD and NEW are source trees (NEW is this one by default). The images are noise in the layout of CIFAR-10, made here.
For each case it prints the largest difference of a number between the two, 0 where they are equal to the last bit; and
a run that OLD began and was stopped in is finished by NEW and compared with OLD's undisturbed one. Exits with 1 if a
case failed in NEW only; differences are for the reader to judge, since a mended number is one.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ALGORITHMS = ("sgd", "rsgd", "esgd", "rsgdxy", "lookahead", "easgd", "parle", "sam")
TRAIN = "cifar10-smallconvnet --epochs 2 --limit-data 300 --batch-size 50 --allow-altered --no-tensorboard --data DATA"
#: Items of the paper that train networks, as short as they go: with --quick on images that the package brings.
ITEMS = {
    "table1": "--quick --epochs 1 --seeds 1 --algorithms sgd rsgd --workers 1",
    "fig2": "--quick --epochs 1 --seeds 1 --algorithms sgd rsgd --workers 1",
    "fig3": "--quick --epochs 1 --moments 1 --algorithms sgd rsgd --max-passes 1 --workers 1",
    "fig4": "--quick --epochs 1 --algorithms sgd rsgd --max-passes 1 --workers 1",
    "fig5": "--quick --epochs 1 --moments 1 --algorithms sgd rsgd --max-passes 1 --workers 1",
    "fig7": "--quick --epochs 1 --dropouts 0 --batch-sizes 12 --weight-decays 0 0.003 --realisations 2 --workers 1",
}
#: A number in a table.
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf|nan", re.IGNORECASE)
COMMITTEES = ("sgd-fast", "sgd-slow", "rsgd-fast", "esgd")
#: What only the new version is told, and the part of its folder that the old one has too: its demo also trains a deep
#: network, as seldom as can be, and has three of the old one's five settings of the committee machine.
NEW_WORDS, NEW_PART = {"demo": "--seeds 1"}, {"demo": "committee"}
#: What says when, where, how long or from which version, and is another in every run.
OF_THE_MOMENT = {
    "seconds",
    "hours",
    "time",
    "date",
    "commit",
    "hardware",
    "host",
    "version",
    "threads",
    "python",
    "torch",
    "path",
}


def cases() -> dict[str, list[str]]:
    """What is typed, by the name of its folder; a number in front: on so many ranks."""
    found = {f"train-{name}": [f"train {TRAIN} --algorithm {name} --out OUT/train-{name}"] for name in ALGORITHMS}
    for name in ("esgd", "parle"):  # whose noise has had tails since 0.2
        found[f"train-{name}-still"] = [f"train {TRAIN} --algorithm {name} --epsilon 0 --out OUT/train-{name}-still"]
    found["train-bf16"] = [f"train {TRAIN} --algorithm rsgd --amp bf16 --out OUT/train-bf16"]
    for name in ("rsgd", "parle"):
        found[f"train-{name}-ranks"] = [f"3 train {TRAIN} --algorithm {name} --out OUT/train-{name}-ranks"]
    found["train-rsgd-jobs"] = [f"train {TRAIN} --algorithm rsgd --fault-tolerant --out OUT/train-rsgd-jobs"]
    for name in COMMITTEES:
        folder = f"committee-{name}"
        found[folder] = [f"train committee-{name} --restarts 3 --patterns 60 --set max_epochs=60 --out OUT/{folder}"]
    # Of equal weights, and twice, as was the default; --max-passes 2 is 64 now where the data are small.
    measured = "local-energy OUT/train-esgd-still --sigmas 0 0.1 0.3 --max-passes 2 --data DATA --json"
    found["train-esgd-still/energy"] = [f"{measured} --noise {noise}" for noise in ("batch", "example")]
    found["committee-sgd-fast/entropy"] = [
        f"local-entropy OUT/committee-sgd-fast --deltas 0.01 0.1 --method {method} --json"
        for method in ("bp", "tap", "ep")
    ]
    found["presets"] = ["presets --json", "presets committee-esgd --json"]
    found["data"] = ["data list --data DATA --json", "data verify dress-coat --json"]
    found["report"] = ["report OUT/train-esgd-still OUT/committee-sgd-fast --out OUT/report/report.html"]
    found["demo"] = ["demo --restarts 1 --out OUT/demo"]
    found |= {name: [f"reproduce {name} {options} --out OUT/reproduce"] for name, options in ITEMS.items()}
    small = "--quick --restarts 2 --subsets 1 --json"
    found["fig1"] = [f"reproduce fig1 {small} --settings sgd-fast rsgd-fast --methods bp --out OUT/reproduce"]
    found["fig6"] = [f"reproduce fig6 {small} --out OUT/reproduce"]
    return found


def run(tree: Path, command: str, out: Path, data: Path, stop_after: float | None = None) -> str | None:
    """What a command printed, None if it failed. With ``stop_after`` it gets SIGTERM when it has entered an epoch."""
    words = [word.replace("OUT", str(out)).replace("DATA", str(data)) for word in command.split()]
    ranks = int(words.pop(0)) if words[0].isdigit() else 0
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*start, "-m", "wideflat", *words], cwd=out, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if stop_after is not None:
        table = Path(words[words.index("--out") + 1]) / "metrics.jsonl"
        while process.poll() is None and not (table.exists() and table.read_text().count("\n") >= 1):
            time.sleep(0.02)
        time.sleep(stop_after)
        process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate()
    if process.returncode and stop_after is None:  # torchrun ends otherwise than with 130 when it is stopped
        print(f"    {tree.name}: {command}\n      {errors.strip().splitlines()[-1] if errors.strip() else 'failed'}")
        return None
    return printed


def numbers(folder: Path) -> dict[str, np.ndarray]:
    """All numbers below a folder that are not of the moment, by file and place."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if any(word in name for word in ("checkpoints", "tensorboard", "energy/")):  # measured in a run: its own case
            continue
        if path.suffix == ".safetensors":
            found.update({f"{name}:{key}": value for key, value in load_file(path).items()})
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                found.update({f"{name}:{key}": arrays[key] for key in arrays.files if arrays[key].dtype.kind in "fiu"})
        elif name.endswith(("metrics.jsonl", "model.json", "energy.json", "printed.json")) or "entropy" in name:
            if path.suffix in (".json", ".jsonl"):
                lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
                for k, line in enumerate(lines):
                    found.update({f"{name}:{k}{key}": value for key, value in _leaves(json.loads(line))})
        elif path.suffix == ".csv":
            found.update({f"{name}:{key}": value for key, value in _cells(path)})
    return found


def _cells(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The numbers of a table, by the words of their row, and the how many-th it is of these words."""
    seen: dict[str, int] = {}
    for row in csv.DictReader(path.open()):
        values = {key: text for key, text in row.items() if key and not any(word in key for word in OF_THE_MOMENT)}
        plain = {key: text for key, text in values.items() if NUMBER.fullmatch(text or "")}
        words = " ".join(text or "" for key, text in values.items() if key not in plain)
        seen[words] = seen.get(words, 0) + 1
        for key, text in plain.items():
            yield f"{words}:{seen[words]}:{key}", np.array(float(text))


def _leaves(value: object, way: str = "") -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in OF_THE_MOMENT:
                yield from _leaves(item, f"{way}.{key}")
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from _leaves(item, f"{way}[{k}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield way, np.array(float(value))


def difference(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> str:
    """The largest relative difference, where it is, and what only one of them has."""
    worst, where = 0.0, ""
    for key in old.keys() & new.keys():
        a, b = np.asarray(old[key], float), np.asarray(new[key], float)
        if a.shape != b.shape:
            worst, where = math.inf, f"{key} {a.shape} {b.shape}"
            continue
        both = np.isnan(a) & np.isnan(b)
        gap = np.where(both, 0, np.abs(a - b) / np.maximum(np.maximum(np.abs(a).max(initial=0), 1e-300), 0))
        largest = float(np.nan_to_num(gap, nan=math.inf).max(initial=0))
        if largest > worst:
            worst, where = largest, key
    text = f"{len(old.keys() & new.keys())} numbers or arrays, largest relative difference {worst:.1e} {where}"
    for label, only in (("old", old.keys() - new.keys()), ("new", new.keys() - old.keys())):
        if only:
            text += f"; only in {label}: {len(only)} ({sorted(only)[0]}, ...)"
    return text


def by_column(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[str]:
    """What differs, one line for all keys that are the same but for their numbers: how many, and the largest."""
    columns: dict[str, list[str]] = {}
    for key in old.keys() & new.keys():
        columns.setdefault(re.sub(r"\d+", "#", key), []).append(key)
    lines = []
    for column, keys in sorted(columns.items()):
        if bad := [key for key in keys if not np.array_equal(old[key], new[key], equal_nan=True)]:
            worst = difference({key: old[key] for key in bad}, {key: new[key] for key in bad})
            lines.append(f"{len(bad)} of {len(keys)} of {column}: {worst.partition('largest relative ')[2]}")
    return lines


def make_cifar10(folder: Path) -> None:
    """Noise with a stripe that tells the class, in CIFAR-10's binary layout."""
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        labels = random.integers(0, 10, 10_000, dtype=np.uint8)
        pixels = random.integers(0, 120, (10_000, 3, 32, 32), dtype=np.uint8)
        pixels[np.arange(10_000), labels % 3, 3 * labels] += 120
        np.concatenate([labels[:, None], pixels.reshape(10_000, -1)], axis=1).tofile(folder / f"{name}.bin")
    (folder / "batches.meta.txt").write_text("\n".join("0123456789") + "\n")


def compare(trees: dict[str, Path], work: Path, only: list[str]) -> bool:
    """All cases; whether none failed in one version alone."""
    data, good = work / "data", True
    if not data.exists():
        make_cifar10(data)
    for name, commands in cases().items():
        if only and not any(name.startswith(word) for word in only):
            continue
        ended = {}
        for label, tree in trees.items():
            out = work / label
            out.mkdir(exist_ok=True)
            more = f" {NEW_WORDS[name]}" if label == "new" and name in NEW_WORDS else ""
            printed = [run(tree, command + more, out, data) for command in commands]
            ended[label] = None not in printed
            (out / name).mkdir(parents=True, exist_ok=True)
            for k, text in enumerate(printed):
                if text and text.lstrip().startswith(("{", "[")):
                    (out / name / f"{k}-printed.json").write_text(text)
        good &= ended["old"] <= ended["new"]
        folder = f"reproduce/{name}-quick" if name in (*ITEMS, "fig1", "fig6") else name
        found = [numbers(work / "old" / folder), numbers(work / "new" / folder / NEW_PART.get(name, ""))]
        print(f"{name:28} {'' if all(ended.values()) else f'{ended} '}{difference(*found)}", flush=True)
        for line in by_column(*found):
            print(f"    {line}", flush=True)
    if not only or "resumed" in only:
        good &= resumed(trees, work, data)
    return good


def resumed(trees: dict[str, Path], work: Path, data: Path) -> bool:
    """Runs that the old version began, stopped in the middle, and the new one finished."""
    good = True
    for name in ("esgd-still", "rsgd", "parle-still", "rsgd-ranks"):
        (command,) = cases()[f"train-{name}"]
        command = command.replace(f"OUT/train-{name}", f"OUT/resumed-{name}")
        shutil.rmtree(work / "new" / f"resumed-{name}", ignore_errors=True)  # of an earlier comparison
        run(trees["old"], command, work / "new", data, stop_after=0.1)
        good &= run(trees["new"], command, work / "new", data) is not None
        found = [numbers(work / "old" / f"train-{name}"), numbers(work / "new" / f"resumed-{name}")]
        print(f"{f'begun by old: {name}':28} {difference(*found)}", flush=True)
    return good


def main() -> int:
    """Compare what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--only", default="", help="beginnings of cases, with commas between them")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    arguments = parser.parse_args()
    trees = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    only = [word for word in arguments.only.split(",") if word]
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        return int(not compare(trees, arguments.keep.resolve(), only))
    with tempfile.TemporaryDirectory() as folder:
        return int(not compare(trees, Path(folder), only))


if __name__ == "__main__":
    sys.exit(main())
