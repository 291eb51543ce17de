"""Text that is shown while it is made: whole characters, stop strings over the borders of tokens; a run's tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qurve.config import content_hash, to_json
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare
from qurve.data.tokenizers import ready_made
from qurve.errors import BadInput
from qurve.generate.text import TextStream, run_tokenizer
from qurve.runfolder import RunFolder
from qurve.train.data import open_data
from tiny import TINY

BYTES, GPT2 = ready_made("bytes"), ready_made("gpt2")
texts = st.text(st.sampled_from("abé東🙂\n"), max_size=14)
stops = st.lists(st.text(st.sampled_from("abé東"), min_size=1, max_size=4), max_size=3)


def streamed(stream: TextStream, ids: Sequence[int]) -> tuple[list[str], bool]:
    """The pieces, and whether a stop string ended them."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], stream.stopped


def whole(ids: list[int], stop: Sequence[str]) -> tuple[str, bool]:
    """The same from the decoded whole: the first token with which a stop string is there ends the text before it."""
    for end in range(1, len(ids) + 1):
        text = BYTES.decode(ids[:end])
        if found := [text.index(string) for string in stop if string in text]:
            return text[: min(found)], True
    return BYTES.decode(ids), False


@given(texts, stops)
@example("aab", ["ab"])
@example("abé", ["é", "b"])
@example("ababa", ["aba", "ab"])
def test_pieces_of_bytes_are_the_whole_up_to_a_stop_string(text: str, stop: list[str]) -> None:
    ids = list(text.encode())
    pieces, stopped = streamed(TextStream(BYTES, stop), ids)
    assert ("".join(pieces), stopped) == whole(ids, stop)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=12), stops)
@example([0xF0, 0x9F, 0x99], [])
@example([0xE6, 0x41, 0x9D, 0xB1], [])
def test_bytes_that_are_no_characters_come_as_they_do_in_the_whole(ids: list[int], stop: list[str]) -> None:
    pieces, stopped = streamed(TextStream(BYTES, stop), ids)
    assert ("".join(pieces), stopped) == whole(ids, stop)


@given(st.text(max_size=30))
@example("A 🙂 in 東京 is naïve")
def test_pieces_of_gpt2_tokens_are_the_whole_and_never_break_a_character(text: str) -> None:
    ids = GPT2.encode_batch([text])[0].tolist()
    pieces, _ = streamed(TextStream(GPT2), ids)
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(BYTES, ["END", "xy"])
    assert [stream.push(token) for token in b"oEEN.Ex!EN"] == ["o", "", "E", "", "EN.", "", "E", "x!", "", ""]
    assert stream.finish() == "EN"
    assert not stream.stopped


def test_a_stop_string_may_span_tokens_and_end_within_one() -> None:
    ids = GPT2.encode_batch(["Good night. The end"])[0].tolist()
    assert [GPT2.decode([token]) for token in ids] == ["Good", " night", ".", " The", " end"]
    stream = TextStream(GPT2, ["ht. T"])
    assert [stream.push(token) for token in ids[:4]] == ["Good", " nig", "", ""]
    assert stream.stopped


# ---------------------------------------------------------------------------------------------------- of a run's folder


def made_run(folder: Path, **data: object) -> RunFolder:
    config = dataclasses.replace(TINY, data=dataclasses.replace(TINY.data, **data))
    run = RunFolder(folder)
    run.create(to_json(config), content_hash(config), {})
    return run


@pytest.mark.parametrize("spec", ["bytes", "gpt2", "bpe:300"])
def test_a_run_names_the_tokenizer_of_its_data(spec: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"The people of the {word} of America, {word}."}) for word in dir(str)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    manifest = prepare([tmp_path / "text.jsonl"], tmp_path / "data", tokenizer=spec, split=0.1, workers=1)
    run = made_run(tmp_path / "run", path=str(tmp_path / "data"), fingerprint=manifest["fingerprint"])
    assert run_tokenizer(run.path).spec == spec
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match=r"which is not there.*--data DIR"):
        run_tokenizer(run.path)
    assert run_tokenizer(run.path, tmp_path / "moved").sha256 == manifest["tokenizer"]["sha256"]
    with pytest.raises(BadInput, match="data is no prepared data: it is not a folder"):
        run_tokenizer(run.path, tmp_path / "data")


def test_a_run_that_was_moved_with_its_embedded_corpus_still_has_it(data_folder: Path, tmp_path: Path) -> None:
    fingerprint = open_data(TINY.data, data_folder).fingerprint
    run = made_run(tmp_path / "run", path=str(tmp_path / "before" / "data"), fingerprint=fingerprint)
    shutil.copytree(data_folder, run.path / "data")
    assert run_tokenizer(run.path).spec == "bytes"


def test_other_data_than_the_runs_is_refused(data_folder: Path, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", path=str(data_folder), fingerprint="0" * 64)
    for data in (None, data_folder):
        with pytest.raises(BadInput, match=r"is not the data that .* was trained on"):
            run_tokenizer(run.path, data)


def test_nanogpts_data_is_of_gpt2_unless_it_has_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(bytes(range(64)))
    run = made_run(tmp_path / "run", path=str(tmp_path), fingerprint=TokenData.open(tmp_path).fingerprint)
    assert run_tokenizer(run.path).spec == "gpt2"
    (tmp_path / "meta.pkl").touch()
    with pytest.raises(BadInput, match="does not say what its ids mean"):
        run_tokenizer(run.path)
