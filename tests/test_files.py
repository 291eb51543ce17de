"""Files that are whole or not there; folders that one process at a time works on; manifests."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurve import files
from qurve.errors import BadInput
from qurve.files import LOCK, MANIFEST, check_manifest, claimed, write_atomic, write_manifest


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("content", ["new and longer", b"bytes"])
def test_a_write_that_fails_leaves_the_old_file_and_names_it(
    failing: str, content: str | bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "status.json"
    write_atomic(file, "old")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "disk full")  # as the system says it: without a path

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match=f"disk full: '{file}'") as failure:
        write_atomic(file, content)
    assert failure.value.errno == errno.ENOSPC
    assert file.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_write_into_nowhere_names_the_file_and_not_its_neighbour(tmp_path: Path) -> None:
    file = tmp_path / "gone" / "status.json"
    with pytest.raises(FileNotFoundError, match=f"'{file}'"):
        write_atomic(file, "text")


@pytest.mark.parametrize("content", ["ends\r\n, ü", b"\x00\xff\r\n"])
def test_what_is_written_is_what_is_there(content: str | bytes, tmp_path: Path) -> None:
    write_atomic(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == (content.encode() if isinstance(content, str) else content)


def test_a_write_is_on_disk_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_atomic(tmp_path / "file", "text")
    assert done == ["fsync", "replace"]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# ------------------------------------------------------------------------------------------------------------- claims

HOLD = """
import sys, time
from pathlib import Path
from qurve.files import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_claimed_folder_is_refused_with_who_has_it_and_a_dead_processes_lock_is_none(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadInput, match=rf"working on {tmp_path} \(process {holder.pid} on .*another --out"):
            claimed(tmp_path).__enter__()
        holder.kill()
        holder.wait()
    assert (tmp_path / LOCK).exists()
    with claimed(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_holds_its_holder_and_nothing_of_an_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"host": "a-name-longer-than-any" * 20, "pid": 1}))
    with claimed(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
        with pytest.raises(BadInput, match=f"process {os.getpid()} on"):
            claimed(tmp_path).__enter__()


def test_a_claim_within_one_process_is_refused_as_well(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(BadInput, match=f"process {os.getpid()} on"):
        claimed(tmp_path).__enter__()
    with claimed(tmp_path):
        pass


def test_a_lock_that_is_removed_while_one_waits_for_it_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = files.fcntl.flock
    removed = []

    def late(handle: int, how: int) -> None:
        flock(handle, how)
        if not removed:  # the holder before us lets go just between our opening and our locking
            removed.append((tmp_path / LOCK).unlink())

    monkeypatch.setattr(files.fcntl, "flock", late)
    with claimed(tmp_path):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(BadInput, match="another process"):
            claimed(tmp_path).__enter__()


def test_a_lock_without_a_name_in_it_still_locks(tmp_path: Path) -> None:
    with claimed(tmp_path):
        for text in ("", "[1]", "{}", "\0"):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(BadInput, match="it has not said which"):
                claimed(tmp_path).__enter__()


def test_a_lock_that_leads_elsewhere_is_refused_and_what_it_leads_to_left_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / LOCK).symlink_to(victim)
    with pytest.raises(BadInput, match=rf"{folder} cannot be locked"):
        claimed(folder).__enter__()
    assert victim.read_text() == "mine"
    (folder / LOCK).unlink()
    (folder / LOCK).mkdir()
    with pytest.raises(BadInput, match=rf"{folder} cannot be locked \(Is a directory\); give another --out"):
        claimed(folder).__enter__()


# ---------------------------------------------------------------------------------------------------------- manifests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(bytes(range(200)))
    (tmp_path / "b.json").write_text("{}")
    write_manifest(tmp_path)
    return tmp_path


def test_what_is_as_it_was_written_passes(folder: Path) -> None:
    check_manifest(folder, "a.bin", "b.json")


@given(place=st.integers(0, 200 * 8 - 1))
def test_any_bit_that_is_flipped_is_noticed_and_its_file_named(
    place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    data = bytearray(range(200))
    (folder / "a.bin").write_bytes(data)
    write_manifest(folder)
    data[place // 8] ^= 1 << place % 8
    (folder / "a.bin").write_bytes(data)
    with pytest.raises(BadInput, match=r"a\.bin is damaged: its sha256 is [0-9a-f]{64}, not [0-9a-f]{64}"):
        check_manifest(folder, "a.bin")


@pytest.mark.parametrize("size", [0, 1, 199, 201])
def test_another_size_is_named(size: int, folder: Path) -> None:
    os.truncate(folder / "a.bin", size)
    with pytest.raises(BadInput, match=rf"a\.bin is damaged: it has {size} bytes, not 200"):
        check_manifest(folder, "b.json", "a.bin")


def test_a_file_that_is_missing_or_leads_elsewhere_is_named(folder: Path) -> None:
    (folder / "a.bin").rename(folder / "elsewhere")
    with pytest.raises(BadInput, match=r"a\.bin is missing"):
        check_manifest(folder, "a.bin")
    (folder / "a.bin").symlink_to(folder / "elsewhere")
    with pytest.raises(BadInput, match=r"a\.bin is a link, which is not followed"):
        check_manifest(folder, "a.bin")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', '{"files": {"a.bin": 1}}', "[" * 100_000])
def test_a_damaged_manifest_is_named(text: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(BadInput, match=r"manifest\.json is damaged"):
        check_manifest(folder, "a.bin")
    (folder / MANIFEST).unlink()
    with pytest.raises(BadInput, match=r"manifest\.json cannot be read"):
        check_manifest(folder, "a.bin")
