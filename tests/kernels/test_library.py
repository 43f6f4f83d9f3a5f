"""The kernels in C: compiled once, kept, loaded only when whole, and done without where there is no compiler."""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import wideflat
from wideflat.files import sha256
from wideflat.kernels import library as kernels
from wideflat.kernels.library import KernelError, compile_kernel, kernel_is_there
from wideflat.kernels.noise import GaussianNoise

compiled = pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here")


#: To compile in a fraction of the time.
QUICK = ["-O0", *kernels.FLAGS[1:]]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of compiled kernels of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", QUICK)
    monkeypatch.setattr(kernels, "_hanging", {})
    kernels._outcome.cache_clear()
    yield tmp_path / "wideflat"
    kernels._outcome.cache_clear()


def step_of(fused):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    wideflat.EntropySGD([p], fused=fused).step()
    return p.detach()


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="no C compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_there_is_a_compiler_there_is_a_kernel(dtype):
    """The other tests are skipped without a kernel, so an error in it must show here."""
    compile_kernel(dtype)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler(fresh, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    assert torch.equal(step_of(None), step_of(False))
    with pytest.raises(KernelError, match=compiler):
        step_of(True)


def test_a_compiler_that_is_no_command(fresh, monkeypatch):
    monkeypatch.setenv("CC", "gcc 'x")
    assert torch.equal(step_of(None), step_of(False))
    with pytest.raises(KernelError, match=r"CC is not a command: .*gcc 'x.*No closing quotation"):
        step_of(True)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name != "posix", reason="a shell script stands for the compiler")
@pytest.mark.parametrize("hangs", ["always", "after its version"])
def test_a_compiler_that_hangs_is_ended_and_said_once(fresh, monkeypatch, tmp_path, hangs):
    """With the processes that it has started, which hold its output open; and no other type of numbers waits again."""
    child = f"echo $$ >> {tmp_path}/started; sleep 600 & echo $! >> {tmp_path}/started; wait"
    text = child if hangs == "always" else f'if [ "$1" = --version ]; then echo 1; else {child}; fi'
    monkeypatch.setenv("CC", script(tmp_path / "hanging", text))
    monkeypatch.setattr(kernels, "TIME_LIMIT", 0.5)
    with pytest.warns(RuntimeWarning, match=r"had not ended after 0.5 seconds .* torch's operations are used") as said:
        assert torch.equal(step_of(None), step_of(False))
        assert not kernel_is_there(torch.zeros(1, dtype=torch.float64))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KernelError, match="had not ended"):
            step_of(True)
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 2
    for process in map(int, started):
        for _ in range(100):
            if not is_running(process):
                break
            time.sleep(0.05)
        assert not is_running(process)


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")  # one that nobody has waited for yet is not running
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


@compiled
def test_a_cache_that_cannot_be_written(fresh, monkeypatch):
    """Then the library is made for this process alone."""
    fresh.write_text("in the way")
    assert torch.equal(step_of(True), step_of(None))
    assert fresh.read_text() == "in the way"


@compiled
def test_compiled_once(fresh, monkeypatch):
    step_of(True)
    (library,) = fresh.iterdir()  # and nothing else is left behind
    first = library.stat().st_mtime_ns
    kernels._outcome.cache_clear()
    step_of(True)
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [first]
    assert fresh.stat().st_mode & 0o077 == 0  # a library from here is loaded: nobody else may write one


DAMAGE = {
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "altered": lambda content: content[:5000] + bytes(byte ^ 0x5A for byte in content[5000:9000]) + content[9000:],
    "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "longer": lambda content: content + b"x",
}


def damage(library, kind):
    """Put another file in its place, as a disk error leaves it: the one that is loaded stays as it is."""
    other = library.with_name("other")
    other.write_bytes(DAMAGE[kind](library.read_bytes()))
    os.replace(other, library)


@compiled
@pytest.mark.parametrize("kind", ["half", "altered"])
def test_a_damaged_library_is_made_anew(fresh, kind):
    """In a process of its own, since what is tested for is a crash."""
    code = f"""
import torch
from wideflat.kernels import library
from wideflat.kernels.noise import GaussianNoise
library.FLAGS = {QUICK}
print(library.kernel_is_there(torch.zeros(1)))
print(torch.equal(GaussianNoise(1).fill(torch.empty(9)), GaussianNoise(1)(0, 0, 9)))
"""
    compile_kernel(torch.float32)
    (library,) = fresh.iterdir()
    damage(library, kind)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.split()) == (0, ["True", "True"]), result.stderr
    (library,) = fresh.iterdir()
    assert library.stem.endswith(sha256(library))


@pytest.mark.parametrize("kind", DAMAGE)
def test_only_whole_libraries_are_found(tmp_path, kind):
    content = bytes(range(256)) * 64
    library = tmp_path / f"kernels-1-{hashlib.sha256(content).hexdigest()}.so"
    library.write_bytes(content)
    library.chmod(0o700)
    assert kernels._find(tmp_path, "kernels-1") == library
    assert kernels._find(tmp_path, "kernels-2") is None
    damage(library, kind)
    assert kernels._find(tmp_path, "kernels-1") is None
    assert not library.exists()


@compiled
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="nobody owns a file here")
@pytest.mark.parametrize("whose", ["writable by others", "of another user"])
def test_a_folder_of_others_is_not_used(fresh, monkeypatch, whose):
    """Neither read nor written: the library is built elsewhere, for this process alone."""
    step_of(True)
    (library,) = fresh.iterdir()
    before = library.stat()
    if whose == "writable by others":
        fresh.chmod(0o777)
    else:
        monkeypatch.setattr(kernels.os, "getuid", lambda: os.stat(fresh).st_uid + 1)
    kernels._outcome.cache_clear()
    loaded = []
    load = kernels.ctypes.CDLL
    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda path: loaded.append(path) or load(path))
    assert torch.equal(step_of(True), step_of(None))
    assert len(loaded) == 1 and str(fresh) not in loaded[0]
    assert not os.path.exists(loaded[0])
    assert [path.stat() for path in fresh.iterdir()] == [before]


@compiled
@pytest.mark.skipif(not hasattr(os, "getuid"), reason="nobody owns a file here")
def test_a_library_that_others_can_write_is_made_anew(fresh):
    compile_kernel(torch.float32)
    (library,) = fresh.iterdir()
    library.chmod(0o777)
    kernels._outcome.cache_clear()
    compile_kernel(torch.float32)
    (library,) = fresh.iterdir()
    assert not library.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@compiled
def test_compiled_without_threads_where_openmp_is_missing(fresh, monkeypatch):
    run = kernels._run

    def no_openmp(command, *place):
        if "-fopenmp" in command and "-c" in command:
            raise KernelError("-fopenmp: not here")
        return run(command, *place)

    monkeypatch.setattr(kernels, "_run", no_openmp)
    assert torch.equal(compile_kernel(torch.float32) and step_of(True), step_of(None))


def test_the_sources_are_those_of_the_folder():
    """What is compiled is what the package brings along: a file that is not named would be missed by users only."""
    folder = kernels.files("wideflat.kernels")
    found = {path.name for path in folder.iterdir() if path.name.endswith((".c", ".h"))}
    assert found == set(kernels.SOURCES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compiler", [None, "no-such-compiler"])
def test_weights_times_noise(fresh, monkeypatch, dtype, compiler):
    """The same numbers with a kernel and without one, whatever the number of threads."""
    if compiler:
        monkeypatch.setenv("CC", compiler)
    weights = torch.linspace(-2, 2, 100_003).to(dtype)
    expected = GaussianNoise(7)(3, 0, len(weights), dtype) * weights
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(GaussianNoise(7).fill(torch.empty_like(weights), weights, step=3), expected)
            noise = GaussianNoise(7).fill(torch.empty(1, 9, dtype=dtype), step=3)
            assert torch.equal(noise, GaussianNoise(7)(3, 0, 9, dtype).view(1, 9))
    finally:
        torch.set_num_threads(before)
