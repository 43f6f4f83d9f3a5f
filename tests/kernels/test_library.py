"""The kernels in C: compiled once, kept, and done without where there is no compiler."""

import shutil
import subprocess

import pytest
import torch
from torch import nn

import wideflat
from wideflat.kernels import library as kernels
from wideflat.kernels.library import KernelError, compile_kernel, kernel_is_there
from wideflat.kernels.noise import GaussianNoise

compiled = pytest.mark.skipif(not kernel_is_there(torch.zeros(1)), reason="no C compiler here")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A cache of compiled kernels of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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


@compiled
def test_a_cache_that_cannot_be_written(fresh, monkeypatch):
    fresh.write_text("in the way")
    assert torch.equal(step_of(None), step_of(False))
    with pytest.raises(KernelError, match=r"File exists|Not a directory"):
        step_of(True)


@compiled
def test_compiled_once(fresh, monkeypatch):
    step_of(True)
    (library,) = fresh.iterdir()  # and nothing else is left behind
    first = library.stat().st_mtime_ns
    kernels._outcome.cache_clear()
    step_of(True)
    assert [path.stat().st_mtime_ns for path in fresh.iterdir()] == [first]
    assert fresh.stat().st_mode & 0o077 == 0  # a library from here is loaded: nobody else may write one


@compiled
def test_compiled_without_threads_where_openmp_is_missing(fresh, monkeypatch):
    run = subprocess.run

    def no_openmp(command, **arguments):
        if "-fopenmp" in command and "-c" in command:
            raise subprocess.CalledProcessError(1, command, stderr=b"-fopenmp: not here")
        return run(command, **arguments)

    monkeypatch.setattr(kernels.subprocess, "run", no_openmp)
    assert torch.equal(compile_kernel(torch.float32) and step_of(True), step_of(None))


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
