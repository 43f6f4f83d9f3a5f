"""The compiled loops in a wheel: made by the build hook, checked before they are loaded."""

import base64
import ctypes
import hashlib
import importlib.util
import json
import shutil
import sys
import types
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

import wideflat
from wideflat.kernels import library, shipped

ROOT = Path(wideflat.__file__).parent.parent
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not (ROOT / "hatch_build.py").exists(), reason="needs a compiler and the sources"
)


@pytest.fixture(scope="module")
def hook():
    """``hatch_build.py``, without hatchling, which only building needs."""
    names = ["hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"]
    names.append("hatchling.builders.hooks.plugin.interface")
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[-1]].BuildHookInterface = object
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, old in before.items():
        if old is None:
            del sys.modules[name]
        else:
            sys.modules[name] = old
    return module


@pytest.fixture(scope="module")
def built(hook, tmp_path_factory):
    place = tmp_path_factory.mktemp("compiled")
    try:
        hook.compile_libraries(place)
    except ValueError as error:
        pytest.skip(str(error))
    return place


@pytest.fixture
def place(built, tmp_path):
    """A copy that can be spoilt."""
    for path in built.glob("kernels-*"):
        shutil.copy(path, tmp_path)
    return tmp_path


def found(place):
    return shipped.shipped_library("float", library._sources(), place)


def test_what_was_built_is_loaded(built):
    path = found(built)
    if path is None:
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        return
    assert path == built / "kernels-float.so"
    assert ctypes.CDLL(str(path)) is not None
    assert path.stat().st_size < 200_000


def test_it_is_used_without_a_compiler_and_does_the_same(built, monkeypatch):
    if found(built) is None:
        pytest.skip("this processor has not what the baseline needs")
    here = steps()
    monkeypatch.setattr(library, "_compiler", lambda: pytest.fail("compiled, though a library was there"))
    monkeypatch.setattr(library, "shipped_library", lambda real, sources: found(built))
    monkeypatch.delenv("CC", raising=False)
    library._outcome.cache_clear()
    try:
        assert torch.equal(steps(), here)
    finally:
        library._outcome.cache_clear()


def steps():
    """Some steps with noise, by the compiled loops."""
    w = torch.nn.Parameter(torch.linspace(-1, 1, 1000))
    optimizer = wideflat.EntropySGD([w], lr=0.5, inner_lr=0.1, inner_steps=2, gamma=0.5, epsilon=0.1, fused=True)
    for _ in range(5):
        w.grad = w.detach().clone()
        optimizer.step()
    return w.detach().clone()


def truncate(place):
    with open(place / "kernels-float.so", "rb+") as file:
        file.truncate(1000)


def alter(place):
    content = bytearray((place / "kernels-float.so").read_bytes())
    content[5000] ^= 1
    (place / "kernels-float.so").write_bytes(content)


def say(**changes):
    def change(place):
        path = place / "kernels-float.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        truncate,
        alter,
        say(machine="another"),
        say(capabilities=["AVX9000"]),
        say(sources="0" * 64),
        lambda place: (place / "kernels-float.json").write_text("{"),
        lambda place: (place / "kernels-float.json").write_text("[]"),
        lambda place: (place / "kernels-float.json").unlink(),
        lambda place: (place / "kernels-float.so").unlink(),
        lambda place: (place / "kernels-float.so").chmod(0o666),
    ],
    ids=["cut", "altered", "machine", "processor", "sources", "no JSON", "a list", "no word", "none", "of others"],
)
def test_what_does_not_fit_is_left_alone(place, spoil):
    spoil(place)
    assert found(place) is None


def test_a_wheel_without_a_compiler_is_one_of_plain_python(hook, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    data = {"force_include": {}}
    made = hook.CustomBuildHook()
    made.initialize("standard", data)
    assert data == {"force_include": {}} and "no C compiler" in capsys.readouterr().err
    made.finalize("standard", data, "")
    made.initialize("editable", data)
    assert data == {"force_include": {}}


def test_a_wheel_with_them_is_for_its_platform(hook, built, monkeypatch):
    data = {"force_include": {}}
    monkeypatch.setattr(hook, "compile_libraries", lambda place: sorted(built.glob("kernels-*.so")))
    hook.CustomBuildHook().initialize("standard", data)
    assert data["pure_python"] is False and data["tag"].startswith("py3-none-linux_")
    assert set(data["force_include"].values()) == {"wideflat/kernels/compiled/kernels-float.so"}


def test_those_for_float64_are_compiled_at_their_first_use(built):
    assert shipped.shipped_library("double", library._sources(), built) is None


@pytest.fixture
def wheel(tmp_path):
    """Two files, one of them executable, and what they are."""
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content, mode in (("a/one.py", b"x = 1\n" * 5000, 0o644), ("a/empty", b"", 0o755)):
            about = zipfile.ZipInfo(name, (2020, 2, 2, 0, 0, 0))
            about.external_attr = mode << 16
            archive.writestr(about, content)
    return path


def packed_by(monkeypatch, compress):
    for name in ("zopfli", "zopfli.zlib"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["zopfli.zlib"].compress = compress


def entries(path):
    with zipfile.ZipFile(path) as archive:
        return [(a.filename, a.date_time, a.external_attr, archive.read(a)) for a in archive.infolist()]


def test_a_wheel_is_packed_smaller(hook, wheel, monkeypatch):
    packed_by(monkeypatch, lambda data: zlib.compress(data, 9))
    before, size = entries(wheel), wheel.stat().st_size
    hook.pack_smaller(wheel)
    assert entries(wheel) == before and wheel.stat().st_size < size
    assert list(wheel.parent.iterdir()) == [wheel]


def test_a_wheel_has_the_code_without_comments_each_statement_where_it_was(hook):
    source = 'x = "# no comment"  # one\n# another, é\n\ndef f(y):\n    # a third\n    return y  # doctest\n'
    bare = hook.without_comments(source.encode()).decode()
    assert bare == 'x = "# no comment"\n\n\ndef f(y):\n\n    return y\n'
    listed = hook.record({"a.py": b"x = 1\n", "w.dist-info/RECORD": b""}, "w.dist-info/RECORD").decode()
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).decode().rstrip("=")
    assert listed == f"a.py,sha256={digest},6\nw.dist-info/RECORD,,\n"


@pytest.mark.parametrize("compress", [lambda data: zlib.compress(data[1:]), lambda data: b"nonsense", lambda data: 3])
def test_a_wheel_that_would_be_another_one_stays(hook, wheel, monkeypatch, compress):
    packed_by(monkeypatch, compress)
    before = wheel.read_bytes()
    made = hook.CustomBuildHook()
    made.finalize("standard", {}, str(wheel))
    assert wheel.read_bytes() == before and list(wheel.parent.iterdir()) == [wheel]
