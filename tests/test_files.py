import os

import pytest

from wideflat.files import atomic_write, sha256


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write("half of the n")
        raise RuntimeError("interrupted")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["table.csv"]


def test_the_folder_is_made_and_bytes_are_written(tmp_path):
    path = tmp_path / "a" / "b" / "x.bin"
    with atomic_write(path, "wb") as file:
        file.write(b"\x00\xff")
        assert not path.exists()
    assert path.read_bytes() == b"\x00\xff"
    assert sha256(path) == "06eb7d6a69ee19e5fbdf749018d3d2abfa04bcbd1365db312eb86dc7169389b8"


def test_permissions_follow_the_umask(tmp_path):
    path = tmp_path / "x"
    with atomic_write(path) as file:
        file.write("")
    plain = tmp_path / "y"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


def test_other_modes_are_refused(tmp_path):
    with pytest.raises(ValueError, match='"w" or "wb"'), atomic_write(tmp_path / "x", "a"):
        pass
