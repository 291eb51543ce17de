"""Reading tokens: windows across shards, nanoGPT's files, and what a damaged folder is told."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.data import loader
from qurve.data.loader import TokenData, TokenSplit
from qurve.errors import BadInput


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    context=st.integers(1, 6),
    data=st.data(),
)
def test_windows_cross_shards(lengths: list[int], context: int, data: st.DataObject) -> None:
    tokens = np.arange(100, 100 + sum(lengths))
    shards = np.split(tokens.astype("<u2"), np.cumsum(lengths)[:-1])
    split = TokenSplit("train", shards)
    assert len(split) == len(tokens)
    last = len(tokens) - context - 1
    starts = data.draw(st.lists(st.integers(0, last), max_size=5)) if last >= 0 else []
    inputs, targets = split.windows(np.array(starts, dtype=np.int64), context)
    assert inputs.shape == targets.shape == (len(starts), context)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.flags.c_contiguous
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(inputs[row], tokens[start : start + context])
        np.testing.assert_array_equal(targets[row], tokens[start + 1 : start + context + 1])
    for bad in (-1, last + 1):
        with pytest.raises(BadInput, match=f"{len(tokens)} tokens"):
            split.windows(np.array([bad]), context)


class Recorded(mmap.mmap):
    asked: ClassVar[list[tuple[int, int]]] = []

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        assert option == mmap.MADV_WILLNEED
        self.asked.append((start, start + length))
        super().madvise(option, start, length)


def test_the_pages_of_all_windows_are_asked_for_and_no_more(tmp_path: Path) -> None:
    tokens = np.arange(20_000, dtype="<u2")
    tokens.tofile(tmp_path / "tokens")
    with open(tmp_path / "tokens", "rb") as file:
        mapped = Recorded(file.fileno(), 0, access=mmap.ACCESS_READ)
    split = TokenSplit("train", [np.ndarray(20_000, "<u2", mapped), tokens])  # the second one is in memory
    Recorded.asked.clear()
    inputs, _ = split.windows(np.array([5_000, 19_990]), 20)
    np.testing.assert_array_equal(inputs[1], [*range(19_990, 20_000), *range(10)])
    pages = mmap.PAGESIZE
    assert Recorded.asked == [(10_000 // pages * pages, 10_042), (39_980 // pages * pages, 40_000)]


def test_prepared_and_nanogpts_files_are_mapped(nanogpt: Path, tmp_path: Path) -> None:
    """Or nothing would be read ahead."""
    shards = TokenData.open(nanogpt).split("train")._shards
    assert all(isinstance(shard.base, mmap.mmap) for shard in shards)
    np.arange(5, dtype="<u2").tofile(tmp_path / "train-00000.bin")
    shard = loader._open_shard(tmp_path, {"name": "train-00000.bin", "tokens": 5}, np.dtype("<u2"))
    assert isinstance(shard.base, mmap.mmap)


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rng.integers(0, 50_257, 300_000).astype("<u2").tofile(tmp_path / "train.bin")
    rng.integers(0, 50_257, 1_000).astype("<u2").tofile(tmp_path / "val.bin")
    return tmp_path


def test_nanogpt_files_as_they_are(nanogpt: Path) -> None:
    data = TokenData.open(nanogpt)
    assert (data.tokenizer, data.n_ids, data.splits) == ("gpt2", 50_257, ("train", "val"))
    train = np.fromfile(nanogpt / "train.bin", dtype="<u2")
    inputs, targets = data.split("train").windows(np.array([0, 298_975]), 1024)
    np.testing.assert_array_equal(inputs[1], train[298_975:299_999])
    np.testing.assert_array_equal(targets[1], train[298_976:])
    assert len(data.split("val")) == 1_000
    with pytest.raises(BadInput, match="did you mean 'train'"):
        data.split("trian")


def test_nanogpt_fingerprint_notices(nanogpt: Path) -> None:
    before = TokenData.open(nanogpt).fingerprint
    assert TokenData.open(nanogpt).fingerprint == before
    for name in ("train.bin", "val.bin"):
        for at in (0, -2):
            whole = (nanogpt / name).read_bytes()
            changed = bytearray(whole)
            changed[at] ^= 1
            (nanogpt / name).write_bytes(changed)
            assert TokenData.open(nanogpt).fingerprint != before
            (nanogpt / name).write_bytes(whole)
    assert TokenData.open(nanogpt).fingerprint == before


def test_nanogpt_fingerprint_of_small_files_is_over_their_names_sizes_and_contents(tmp_path: Path) -> None:
    contents = {"train.bin": b"\1\0\2\0\3\0", "val.bin": b"\4\0"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    text = b"train.bin 6\n" + contents["train.bin"] + b"val.bin 2\n" + contents["val.bin"]
    assert TokenData.open(tmp_path).fingerprint == hashlib.sha256(text).hexdigest()
    (tmp_path / "train.bin").write_bytes(b"\1\0\2\0")  # the same ids in the same order, cut elsewhere
    (tmp_path / "val.bin").write_bytes(b"\3\0\4\0")
    assert TokenData.open(tmp_path).fingerprint != hashlib.sha256(text).hexdigest()


def test_meta_pkl_is_not_unpickled(nanogpt: Path) -> None:
    (nanogpt / "meta.pkl").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    np.array([3, 64, 7], dtype="<u2").tofile(nanogpt / "val.bin")
    np.arange(60, dtype="<u2").tofile(nanogpt / "train.bin")
    data = TokenData.open(nanogpt)
    assert (data.tokenizer, data.n_ids) == ("unknown", 65)


def test_damaged_nanogpt_files(nanogpt: Path) -> None:
    np.array([50_257] * 10, dtype="<u2").tofile(nanogpt / "val.bin")
    with pytest.raises(BadInput, match="50257"):
        TokenData.open(nanogpt)
    (nanogpt / "val.bin").write_bytes(b"abc")
    with pytest.raises(BadInput, match="3 bytes"):
        TokenData.open(nanogpt)


def folder_with(tmp_path: Path, name: str = "train-00000.bin", tokens: int = 10, **change: object) -> Path:
    file = tmp_path / "train-00000.bin"
    np.arange(10, dtype="<u2").tofile(file)
    shard = {"name": name, "tokens": tokens, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest = {
        "format": 1,
        "fingerprint": "f",
        "tokenizer": {"spec": "bytes"},
        "n_ids": 257,
        "dtype": "uint16",
        "splits": {"train": {"tokens": tokens, "shards": [shard]}},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
    return tmp_path


def test_tokens_that_were_changed_in_place_are_named_when_they_are_verified(tmp_path: Path) -> None:
    data = TokenData.open(folder_with(tmp_path))
    data.verify()
    shard = np.memmap(tmp_path / "train-00000.bin", dtype="<u2", mode="r+")
    shard[3] = 9
    shard.flush()
    with pytest.raises(BadInput, match=r"train-00000\.bin is not what was prepared: its sha256 is"):
        data.verify()


def test_a_sound_folder_opens(tmp_path: Path) -> None:
    data = TokenData.open(folder_with(tmp_path))
    assert (data.fingerprint, data.tokenizer, data.n_ids, data.splits) == ("f", "bytes", 257, ("train",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 11}, "train-00000.bin has 20 bytes; 22 are expected"),
        ({"tokens": 9}, "train-00000.bin has 20 bytes; 18 are expected"),
        ({"name": "train-00001.bin"}, "train-00001.bin is missing"),
        ({"name": "../train-00000.bin"}, "no name of a shard"),
        ({"name": "/etc/passwd"}, "no name of a shard"),
        ({"format": 2}, "format 1"),
        ({"dtype": "float32"}, "damaged"),
        ({"splits": []}, "damaged"),
        ({"splits": {"train": {"tokens": 0, "shards": []}}}, "damaged"),
        ({"splits": {"train": {"tokens": 3, "shards": [{"name": "train-00000.bin", "tokens": 10}]}}}, "3 tokens"),
    ],
)
def test_damaged_folders(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TokenData.open(folder_with(tmp_path, **change))


def test_what_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds neither.*qurve prepare"):
        TokenData.open(tmp_path)
    with pytest.raises(BadInput, match="is not a folder"):
        TokenData.open(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        TokenData.open(tmp_path)
