"""Preparing: exact tokens in nanoGPT's order, the manifest's figures, resuming, refusals that leave nothing behind."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.data import prepare as module
from qurve.data import tokenizers
from qurve.data.corpus import embedded_corpus
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare, split_documents
from qurve.errors import BadInput


def write_documents(folder: Path, n: int) -> tuple[Path, list[str]]:
    texts = [f"Document {i} says {'ja ' * (i % 7)}é." for i in range(n)]
    file = folder / "in.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file, texts


def everything(data: TokenData, split: str) -> list[int]:
    tokens = data.split(split)
    inputs, targets = tokens.windows(np.array([0]), len(tokens) - 1)
    return [*inputs[0].tolist(), int(targets[0, -1])]


def expected(tokenizer: tokenizers.Tokenizer, texts: list[str], order: np.ndarray) -> list[int]:
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    return [i for ids in encoded for i in [*ids.tolist(), tokenizer.eot]]


def tree(folder: Path) -> dict[str, str]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --------------------------------------------------------------------------------------------------------- splits


def test_openwebtext_splits_as_published() -> None:
    splits = split_documents(8_013_769, None)
    assert (len(splits["train"]), len(splits["val"])) == (8_009_762, 4_007)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 249, 1_999, 2_000, 2_001, 54_321])
def test_splits_are_those_of_datasets(n: int) -> None:
    import datasets

    theirs = datasets.Dataset.from_dict({"i": range(n)}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    mine = split_documents(n, None)
    assert mine["train"].tolist() == theirs["train"]["i"][:]
    assert mine["val"].tolist() == theirs["test"]["i"][:]


@given(n=st.integers(0, 5_000), fraction=st.one_of(st.none(), st.floats(0.0001, 0.4999)))
@settings(deadline=None)
def test_splits_cover_and_keep_apart(n: int, fraction: float | None) -> None:
    if n < 2 or (fraction is not None and 2 * np.ceil(fraction * n) >= n):
        with pytest.raises(BadInput, match=f"{n} documents? cannot be split"):
            split_documents(n, fraction)
        return
    splits = split_documents(n, fraction)
    train, val, test = (set(splits[name].tolist()) for name in ("train", "val", "test"))
    assert all(splits[name].size for name in splits)
    assert not train & (val | test)
    assert train | val | test == set(range(n))
    if fraction is None:
        assert test <= val
        assert len(test) == (len(val) + 1) // 2
    else:
        assert not test & val
        assert len(test) == len(val) == np.ceil(fraction * n)


# --------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("spec", "split", "dtype"), [("gpt2", None, "uint16"), ("bytes", 0.1, "uint16"), ("bpe:300", 0.2, "uint16")]
)
def test_tokens_and_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, split: Any, dtype: str
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 700)  # so that documents and windows cross shards
    monkeypatch.setattr(module, "BUFFER_TOKENS", 512)
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 900)
    file, texts = write_documents(tmp_path, 60)
    out = tmp_path / "made" / "out"
    manifest = prepare([file], out, tokenizer=spec, split=split, progress=False)
    assert json.loads((out / "manifest.json").read_text()) == manifest
    tokenizer, data, splits = tokenizers.load(out), TokenData.open(out), split_documents(60, split)
    assert (data.tokenizer, data.n_ids, data.fingerprint) == (spec, tokenizer.n_ids, manifest["fingerprint"])
    assert manifest["dtype"] == dtype
    hashes = []
    for name, order in splits.items():
        tokens = expected(tokenizer, texts, order)
        assert everything(data, name) == tokens
        stated = manifest["splits"][name]
        assert (stated["documents"], stated["tokens"]) == (len(order), len(tokens))
        assert stated["bytes"] == sum(len(texts[i].encode()) for i in order)
        full, rest = divmod(len(tokens), 700)
        assert [s["tokens"] for s in stated["shards"]] == [700] * full + [rest] * (rest > 0)
        for shard in stated["shards"]:
            assert hashlib.sha256((out / shard["name"]).read_bytes()).hexdigest() == shard["sha256"]
            hashes.append(shard["sha256"])
    text = "\n".join([tokenizer.sha256, dtype, *hashes])
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["fingerprint"]
    assert manifest["sources"][0]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    left = {entry.name for entry in out.iterdir() if not entry.name.endswith(".bin")}
    assert left == {"manifest.json"} | ({"tokenizer.json"} if spec.startswith("bpe") else set())


@pytest.mark.parametrize(("n_ids", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_32_bits_only_when_16_do_not_hold_them(
    n_ids: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(tokenizers._Bytes):
        def __init__(self) -> None:
            super().__init__()
            self.n_ids, self.eot = n_ids, n_ids - 1

    monkeypatch.setattr(tokenizers, "ready_made", lambda spec: Wide())
    file, texts = write_documents(tmp_path, 5)
    assert prepare([file], tmp_path / "out", tokenizer="bytes", split=0.2, progress=False)["dtype"] == dtype
    order = split_documents(5, 0.2)["train"]
    assert everything(TokenData.open(tmp_path / "out"), "train") == expected(Wide(), texts, order)


def test_bpe_is_trained_on_the_training_documents_alone(tmp_path: Path) -> None:
    file, texts = write_documents(tmp_path, 60)
    prepare([file], tmp_path / "out", tokenizer="bpe:280", split=0.2, progress=False)
    train = [texts[i] for i in sorted(split_documents(60, 0.2)["train"])]
    assert tokenizers.load(tmp_path / "out").sha256 == tokenizers.train_bpe(280, train).sha256


def test_dropped_input_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in {"a.txt": "a", "b.txt": "", "c.txt": "c", "d.bin": "?", "e.txt": "e"}.items():
        (folder / name).write_text(text)
    manifest = prepare([folder], tmp_path / "out", tokenizer="bytes", progress=False)
    assert manifest["dropped"] == [
        {"file": str(folder / "d.bin"), "reason": "not a kind of file that is read from folders", "count": 1},
        {"file": str(folder / "b.txt"), "reason": "empty file", "count": 1},
    ]
    assert sum(manifest["splits"][name]["documents"] for name in ("train", "val")) == 3


def test_any_number_of_workers_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 500)
    file, _ = write_documents(tmp_path, 100)
    one = prepare([file], tmp_path / "one", tokenizer="bpe:280", workers=1, progress=False)
    two = prepare([file], tmp_path / "two", tokenizer="bpe:280", workers=2, progress=False)
    assert one == two
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


# ------------------------------------------------------------------------------------------- resuming and refusing


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("spec", ["bytes", "bpe:280"])
@pytest.mark.parametrize("where", ["third chunk", "splits", "last rename"])
def test_stopped_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, where: str) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 500)
    monkeypatch.setattr(module, "SHARD_TOKENS", 512)
    file, _ = write_documents(tmp_path, 100)
    out = tmp_path / "out"
    whole = prepare([file], tmp_path / "whole", tokenizer=spec, split=0.1, progress=False)
    encoded: list[int] = []
    encode = module._encode

    def stopping(tokenizer: Any, dtype: str, texts: list[str]) -> tuple[bytes, bytes]:
        if where == "third chunk" and len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(len(texts))
        return encode(tokenizer, dtype, texts)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_encode", stopping)
        if where == "splits":
            patch.setattr(module._ShardWriter, "_finish_shard", stop)
        if where == "last rename":
            patch.setattr(module, "_write_synced", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([file], out, tokenizer=spec, split=0.1, progress=False)
    with pytest.raises(BadInput, match="no prepared data"):
        TokenData.open(out)
    before = sum(encoded)
    (work,) = out.glob(".prepare-*")
    for name in ("tokens.bin", "documents.bin", "journal.jsonl"):
        with open(work / name, "ab") as torn:  # what a killed process had half written
            torn.write(b'{"doc')
    encoded.clear()
    where = "nowhere"
    monkeypatch.setattr(module, "_encode", stopping)
    assert prepare([file], out, tokenizer=spec, split=0.1, progress=False) == whole
    assert sum(encoded) == 100 - before
    assert tree(out) == tree(tmp_path / "whole")


def test_stopped_again_right_after_being_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first process had half written to the journal is not the beginning of what the second one writes."""
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 500)
    file, _ = write_documents(tmp_path, 100)
    out = tmp_path / "out"
    whole = prepare([file], tmp_path / "whole", tokenizer="bytes", progress=False)
    encode = module._encode

    def stop_after(chunks: int) -> None:
        left = iter(range(chunks))

        def stopping(*arguments: Any) -> tuple[bytes, bytes]:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return encode(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_encode", stopping)
            with pytest.raises(KeyboardInterrupt):
                prepare([file], out, tokenizer="bytes", progress=False)

    stop_after(2)
    (journal,) = out.glob(".prepare-*/journal.jsonl")
    with open(journal, "a") as torn:
        torn.write('{"doc')
    stop_after(1)
    assert [list(json.loads(line)) for line in journal.read_text().splitlines()] == [["documents", "tokens"]] * 3
    assert prepare([file], out, tokenizer="bytes", progress=False) == whole
    assert tree(out) == tree(tmp_path / "whole")


def test_killed_between_the_manifest_and_the_clearing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write_documents(tmp_path, 60)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([file], out, tokenizer="bpe:280", split=0.1, progress=False)
    assert list(out.glob(".prepare-*"))
    prepare([file], out, tokenizer="bpe:280", split=0.1, progress=False)
    prepare([file], tmp_path / "whole", tokenizer="bpe:280", split=0.1, progress=False)
    assert tree(out) == tree(tmp_path / "whole")
    TokenData.open(out)


def test_workers_leave_an_interrupt_to_their_parent() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, module._start_worker, ("bytes", "")) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN


def test_changed_input_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 500)
    file, _ = write_documents(tmp_path, 100)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_synced", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([file], tmp_path / "out", tokenizer="bytes", progress=False)
    file.write_text(file.read_text().replace("says", "SAYS"))
    got = prepare([file], tmp_path / "out", tokenizer="bytes", progress=False)
    assert got == prepare([file], tmp_path / "fresh", tokenizer="bytes", progress=False)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_killed_process_is_taken_up_again(tmp_path: Path) -> None:
    code = (
        "import sys, qurve.data.prepare as p; p.CHUNK_CHARACTERS = 500; real = p._encode\n"
        "def slow(*a):\n"
        "    if len(sys.argv) > 3:\n"
        "        import time; time.sleep(0.02)\n"
        "    return real(*a)\n"
        "p._encode = slow; p.prepare([sys.argv[1]], sys.argv[2], tokenizer='bytes')"
    )
    file, _ = write_documents(tmp_path, 2_000)
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", code, file, out, "slow"])
    journals: list[Path] = []
    deadline = time.monotonic() + 30
    while not (journals and journals[0].stat().st_size > 200) and time.monotonic() < deadline:
        journals = list(out.glob(".prepare-*/journal.jsonl"))
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "manifest.json").exists()
    again = subprocess.run([sys.executable, "-c", code, file, out], capture_output=True, text=True, check=True)
    assert "went on from" in again.stderr
    prepare([file], tmp_path / "whole", tokenizer="bytes", progress=False)
    assert tree(out) == tree(tmp_path / "whole")


def test_the_same_data_is_returned_other_data_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = write_documents(tmp_path, 20)
    out = tmp_path / "out"
    manifest = prepare([file], out, tokenizer="bytes", progress=False)
    before = tree(out)
    assert prepare([file], out, tokenizer="bytes") == manifest
    assert "holds this data already" in capsys.readouterr().err
    moved = file.rename(tmp_path / "moved.jsonl")  # another place and time, the same content
    os.utime(moved, (1, 1))
    assert prepare([moved], out, tokenizer="bytes", progress=False) == manifest
    for change in ({"tokenizer": "gpt2"}, {"split": 0.1}):
        with pytest.raises(BadInput, match="never overwritten"):
            prepare([moved], out, **{"tokenizer": "bytes", "progress": False, **change})
    moved.write_text(moved.read_text().replace("says", "SAYS"))
    with pytest.raises(BadInput, match="never overwritten"):
        prepare([moved], out, tokenizer="bytes", progress=False)
    assert tree(out) == before


def two_files(folder: Path, second: bytes) -> list[Path]:
    (folder / "a.txt").write_text("sound")
    (folder / "b.txt").write_bytes(second)
    return [folder / "a.txt", folder / "b.txt"]


@pytest.mark.parametrize(
    ("paths", "options", "message"),
    [
        (lambda f: two_files(f, b"ab\xff"), {}, r"b.txt: not UTF-8 at byte offset 2"),
        (lambda f: two_files(f, b"ab\xff"), {"workers": 2}, r"b.txt: not UTF-8 at byte offset 2"),
        (lambda f: two_files(f, b"ab\xff"), {"tokenizer": "bpe:300"}, r"b.txt: not UTF-8 at byte offset 2"),
        (lambda f: two_files(f, b"ab"), {"tokenizer": "bpe:300"}, r"too small for bpe:300"),
        (lambda f: two_files(f, b"ab"), {"split": 0.05}, r"2 documents cannot be split.* takes more of them"),
        (lambda f: two_files(f, b""), {}, r"1 document cannot be split.* at least 2"),
        (lambda f: two_files(f, b"")[1:], {}, r"all 1 documents are empty .*b.txt"),
        (lambda f: two_files(f, b"")[1:], {"tokenizer": "bpe:300"}, r"all 1 documents are empty"),
        (lambda f: two_files(f, b"ab"), {"tokenizer": "gpt"}, r"did you mean 'gpt2'"),
        (lambda f: two_files(f, b"ab"), {"split": 0.5}, r"split 0.5"),
        (lambda f: two_files(f, b"ab"), {"workers": 0}, r"0 workers"),
        (lambda f: [f / "missing"], {}, r"missing does not exist"),
    ],
)
def test_refusals_leave_nothing_behind(
    tmp_path: Path, paths: Callable[[Path], list[Path]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(paths(tmp_path), tmp_path / "made" / "out", progress=False, **options)
    assert not (tmp_path / "made").exists()


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    file, _ = write_documents(tmp_path, 20)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00000.bin").write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(BadInput, match=r"not empty \(it holds train-00000.bin\)"):
        prepare([file], tmp_path / "out", progress=False)
    with pytest.raises(BadInput, match="cannot be the output folder"):
        prepare([file], file, progress=False)
    assert tree(tmp_path) == before


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    file, _ = write_documents(tmp_path, 20)
    with module._claimed(tmp_path / "out"), pytest.raises(BadInput, match="another process"):
        prepare([file], tmp_path / "out", progress=False)
    prepare([file], tmp_path / "out", tokenizer="bytes", progress=False)


@pytest.mark.slow
def test_the_embedded_corpus(tmp_path: Path) -> None:
    manifest = prepare([embedded_corpus()], tmp_path / "out", split=0.05, progress=False)
    assert [manifest["splits"][name]["documents"] for name in ("train", "val", "test")] == [223, 13, 13]
    assert sum(split["tokens"] for split in manifest["splits"].values()) == 2_389_157
