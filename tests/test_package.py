"""The front door: every public name is there, nothing else is shown, and what is not asked for is not imported."""

import subprocess
import sys

import wideflat


def test_every_public_name_is_there_and_shown():
    assert set(wideflat.__all__) == {*wideflat._PLACES, "__version__"}
    for name in wideflat.__all__:
        assert getattr(wideflat, name) is not None
    assert set(dir(wideflat)) == {*wideflat.__all__, *wideflat._ROOMS}
    assert wideflat.local_energy.__module__ == "wideflat.energy.measure"


def test_a_wrong_name_is_an_attribute_error():
    assert not hasattr(wideflat, "local_enthalpy")


def test_training_does_not_import_the_measures():
    code = (
        "import sys, wideflat; wideflat.EntropySGD; wideflat.Focusing; "
        "print(sorted(m for m in sys.modules if m.startswith(('wideflat.ener', 'wideflat.entropy.', 'wideflat.data'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_public_name_imports_the_compiler_of_torch():
    """It takes a second; torch imports it by itself with the first optimizer that is made."""
    code = (
        "import sys, wideflat;\n"
        "for name in wideflat.__all__:\n"
        "    getattr(wideflat, name)\n"
        "    assert 'torch._dynamo' not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
