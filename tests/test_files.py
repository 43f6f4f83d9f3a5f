import os
import pickle
import stat

import numpy as np
import pytest

from wideflat.files import atomic_write, missing, names_in_npz, read_npz, sha256


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


def test_npz_files_are_read_whole_or_refused_by_name(tmp_path):
    good = tmp_path / "good.npz"
    np.savez(good, a=np.arange(3), b=np.ones(2))
    assert read_npz(good, "a")["a"].tolist() == [0, 1, 2] and names_in_npz(good) == ["a", "b"]
    with pytest.raises(ValueError, match=r"good\.npz has no array c and no d; it has a, b"):
        read_npz(good, "a", "c", "d")
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "nowhere.npz")
    (tmp_path / "cut.npz").write_bytes(good.read_bytes()[:-40])
    (tmp_path / "pickled.npz").write_bytes(pickle.dumps({"a": 1}))
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.ones(3))
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    damaged = bytearray(good.read_bytes())
    damaged[150] ^= 255  # within the numbers: the checksum of the archive finds it
    (tmp_path / "flipped.npz").write_bytes(damaged)
    for name in ("cut", "pickled", "one", "objects", "flipped"):
        with pytest.raises(ValueError, match=rf"{name}\.npz is not a whole \.npz file of plain arrays"):
            read_npz(tmp_path / f"{name}.npz")


def test_a_run_whose_name_has_more_in_it_is_suggested(tmp_path):
    (tmp_path / "cifar10-smallconvnet-sgd-photos-epochs15-batch-size30-limit-data300-seed0").mkdir()
    assert "did you mean" in missing(tmp_path / "cifar10-smallconvnet-sgd-0")
    assert "did you mean" not in missing(tmp_path / "something-else")


def test_a_pipe_or_a_device_stays_what_it_is(tmp_path):
    """A rename would put a file in its place: for root, in that of /dev/null."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link):
        with pytest.raises(ValueError, match=r"(pipe|link) is no file .* not written to"), atomic_write(place) as file:
            file.write("x")
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]
