"""No kernel reads or writes beside its tensors, or does what C leaves undefined: built with gcc's sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]


def runtime(name):
    """The sanitizer's library, which a process that is not itself compiled with it must load first."""
    if not shutil.which("gcc"):
        return ""
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else ""


RUNTIMES = [runtime(name) for name in ("libasan.so", "libubsan.so")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a file of Python whose kernels are built with the sanitizers."""
    cache = tmp_path_factory.mktemp("sanitized")

    def run(*arguments):
        environment = {
            **os.environ,
            "CC": " ".join(["gcc", *SANITIZERS]),
            "XDG_CACHE_HOME": str(cache),
            "LD_PRELOAD": " ".join(RUNTIMES),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are not ours
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "2",
            "OMP_WAIT_POLICY": "passive",
        }
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)

    return run


pytestmark = pytest.mark.skipif(not all(RUNTIMES), reason="gcc has no sanitizers here")


@pytest.mark.parametrize("sizes", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_every_entry_point(run, sizes):
    result = run(Path(__file__).with_name("every_entry_point.py"), f"--{sizes}")
    assert (result.returncode, result.stdout.strip()) == (0, "no error"), result.stdout[-1000:] + result.stderr[-5000:]


def test_an_overrun_would_be_seen(run):
    """The sanitizers do look: a length that is one too large ends the process."""
    code = """
import ctypes, torch
from wideflat.kernels import library
from wideflat.kernels.noise import GaussianNoise
source, one, out = GaussianNoise(0).source(0), ctypes.c_int64(1), torch.empty(100)
library.FLAGS = ["-O1", *library.FLAGS[1:]]
multiply = library.compile_kernel(torch.float32).multiply
multiply(one, ctypes.c_int64(101), ctypes.c_int64(0), ctypes.byref(source), library.pointer(out), None)
"""
    result = run("-c", code)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
