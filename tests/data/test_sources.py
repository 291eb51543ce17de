"""Reading documents: every format, in a fixed order; broken input is named with its file and place."""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from qurve.data.sources import RECIPES, Sources, _lines
from qurve.errors import BadInput, QurveError

TEXTS = ["one", "two\n\nlines \r\n", "drei ü 🙂", " "]
LINES = "".join(json.dumps({"source": "x", "text": text}) + "\n" for text in TEXTS).encode()


def read(*paths: object) -> list[str]:
    return list(Sources([str(p) for p in paths]).documents())


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    ).compress(data)


def write(file: Path, data: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", b"\n" + LINES.rstrip(b"\n")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.gz", gzip.compress(LINES[:20], mtime=0) + gzip.compress(LINES[20:], mtime=0)),
        ("a.jsonl.zst", zst(LINES)),
        ("a.jsonl.zst", zst(LINES[:20]) + zst(LINES[20:])),
    ],
)
def test_lines(tmp_path: Path, name: str, data: bytes) -> None:
    assert read(write(tmp_path / name, data)) == TEXTS


@pytest.mark.parametrize("window_log", [28, 31])
def test_zstd_of_a_long_window(tmp_path: Path, window_log: int) -> None:
    """As `zstd --long=31` writes it: the frame asks for a window that decoders refuse unless told otherwise.

    Built by hand, since a compressor that is given all of a short text asks for no more window than that.
    """
    header = b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3])
    block = (1 | len(LINES) << 3).to_bytes(3, "little") + LINES  # the last one, and not compressed
    assert read(write(tmp_path / "a.jsonl.zst", header + block)) == TEXTS


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(4)), "text": TEXTS}), tmp_path / "a.parquet", row_group_size=3)
    sources = Sources([tmp_path / "a.parquet"])
    assert list(sources.documents()) == TEXTS
    assert sources.done == sources.size


def test_a_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    assert read(write(tmp_path / "anything.log", "\ufeffa\r\nb\n".encode())) == ["\ufeffa\r\nb\n"]


def test_folders_by_name(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"b")
    write(tmp_path / "a" / "z.md", b"az")
    write(tmp_path / "a.txt", b"a")
    write(tmp_path / "c" / "x.jsonl", b'{"text": "cx"}')
    write(tmp_path / ".hidden.txt", b"hidden")
    write(tmp_path / ".git" / "h.txt", b"hidden")
    write(tmp_path / "out" / "o.txt", b"out")
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "e.txt", b"")
    sources = Sources([tmp_path, tmp_path / "b.txt"], leave_out=tmp_path / "out")
    assert list(sources.documents()) == ["a", "az", "b", "cx"]
    assert list(sources.documents()) == ["a", "az", "b", "cx"]
    assert sources.dropped == {
        (str(tmp_path / "picture.png"), "not a kind of file that is read from folders"): 1,
        (str(tmp_path / "b.txt"), "given twice"): 1,
        (str(tmp_path / "e.txt"), "empty file"): 1,
    }


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": ""}\n{"text": "x"}\n{"text": ""}\n')
    sources = Sources([file])
    assert list(sources.documents()) == ["x"]
    assert sources.dropped == {(str(file), "empty document"): 2}


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=60).map(lambda b: b.replace(b"a", b"\n")), size=st.integers(1, 9))
def test_lines_are_those_of_the_whole(data: bytes, size: int) -> None:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    found = list(_lines(iter(pieces)))
    whole = data.split(b"\n")
    assert [line for _, _, line in found] == (whole[:-1] if whole[-1] == b"" else whole)
    for number, (stated, offset, line) in enumerate(found, 1):
        assert stated == number
        assert data[offset : offset + len(line)] == line
        assert data[:offset].count(b"\n") == number - 1


GOOD = b'{"text": "x"}\n'


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"good \xe9t\xe9", r"a.txt: not UTF-8 at byte offset 5 \(0xe9\)"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}', r"a.jsonl, line 2: not UTF-8 at byte offset 24 \(0xff\)"),
        ("a.jsonl", GOOD + b'{"text": "x"', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", GOOD + b"[1]", "a.jsonl, line 2: not a JSON object"),
        ("a.jsonl", b'{"txt": "x"}', "a.jsonl, line 1: no field 'text'; it has: txt"),
        ("a.jsonl", b'{"text": null}', "a.jsonl, line 1: 'text' is not a text but null"),
        ("a.jsonl", b'{"text": "ab\\ud800"}', "a.jsonl, line 1: half a surrogate pair .* at character 2"),
        ("a.jsonl.gz", GOOD, "a.jsonl.gz is corrupt"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "a.jsonl.gz is cut short"),
        ("a.jsonl.zst", GOOD, "a.jsonl.zst is corrupt"),
        ("a.jsonl.zst", zst(LINES * 50)[:-5], "a.jsonl.zst is cut short"),
        ("a.parquet", GOOD, "a.parquet is corrupt"),
    ],
)
def test_broken_input(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(write(tmp_path / name, data))


def test_broken_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": TEXTS}), file)
    with pytest.raises(BadInput, match=r"no column 'text'; it has: body"):
        read(file)
    pq.write_table(pa.table({"text": ["x", None]}), file)
    with pytest.raises(BadInput, match=r"row 1: 'text' is not a text but null"):
        read(file)
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\x02\0\0\0"), pa.py_buffer(b"a\xff"))
    pq.write_table(pa.table({"text": bad}), file)
    with pytest.raises(BadInput, match=r"row 0: not UTF-8 at byte offset 1 \(0xff\)"):
        read(file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadInput, match="corrupt"):
        read(file)


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing.txt does not exist"):
        Sources([tmp_path / "nothing.txt"])
    with pytest.raises(BadInput, match="nothing to read in"):
        Sources([tmp_path])
    with pytest.raises(BadInput, match="no input at all"):
        Sources([])


def test_the_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'qurve\[hf\]'"):
        Sources(["hf:openwebtext"])


class FakeDataSet:
    """As `datasets.IterableDataset`: no length, and perhaps nothing known of it beforehand."""

    def __init__(self, columns: list[str] | None = None, size: int | None = None, breaks_at: int | None = None) -> None:
        self.column_names, self._breaks_at = columns, breaks_at
        self._field = "body" if columns == ["body"] else "text"
        split = types.SimpleNamespace(num_bytes=size)
        self.info = types.SimpleNamespace(splits=None if size is None else {"train": split})

    def __iter__(self) -> Iterator[dict[str, str]]:
        for row, text in enumerate(TEXTS):
            if row == self._breaks_at:
                raise ConnectionError("reset by peer\nat a bad time")
            yield {"id": str(row), self._field: text}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, FakeDataSet], list[dict[str, object]]]:
    """What the hub has, and what it was asked for."""
    there: dict[str, FakeDataSet] = {}
    asked: list[dict[str, object]] = []

    def load_dataset(name: str, config: str | None, **options: object) -> FakeDataSet:
        asked.append({"name": name, "config": config, **options})
        return there[name]

    def dataset_info(name: str) -> types.SimpleNamespace:
        if name not in there:
            raise ConnectionError("no route\nto host")
        return types.SimpleNamespace(sha=f"commit of {name}")

    api = types.SimpleNamespace(dataset_info=dataset_info)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=lambda: api))
    return there, asked


def test_the_hub_is_streamed_at_one_commit(hub: tuple[dict[str, FakeDataSet], list[dict[str, object]]]) -> None:
    there, asked = hub
    there["some/text"] = FakeDataSet(["id", "text"], size=10)
    assert read("hf:some/text", "hf:some/text@en:test") == TEXTS * 2
    same = {"name": "some/text", "revision": "commit of some/text", "streaming": True}
    assert asked == [{**same, "config": None, "split": "train"}, {**same, "config": "en", "split": "test"}]
    sources = Sources(["hf:some/text"])
    assert sources.content() == [{"name": "hf:some/text", "bytes": 10, "sha256": "commit of some/text"}]
    assert sources.streamed
    assert list(sources.documents()) == list(sources.documents())


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_recipe_is_one_line(name: str, hub: tuple[dict[str, FakeDataSet], list[dict[str, object]]]) -> None:
    there, asked = hub
    repository, _, config = RECIPES[name].partition("@")
    there[repository] = FakeDataSet()
    assert read(f"hf:{name}") == TEXTS
    assert (asked[0]["name"], asked[0]["config"], asked[0]["split"]) == (repository, config or None, "train")


def test_what_the_hub_does_not_give(hub: tuple[dict[str, FakeDataSet], list[dict[str, object]]]) -> None:
    there, _ = hub
    with pytest.raises(BadInput, match=r"hf:far/away cannot be had .*ConnectionError: no route\)"):
        Sources(["hf:far/away"])
    there["some/text"] = FakeDataSet(["body"])
    with pytest.raises(BadInput, match=r"no column 'text'; it has: body"):
        Sources(["hf:some/text"])
    there["some/text"] = FakeDataSet(breaks_at=1)
    with pytest.raises(
        QurveError, match=r"hf:some/text, row 1: the stream .* broke off \(.*: reset by peer\)"
    ) as broken:
        read("hf:some/text")
    assert not isinstance(broken.value, BadInput)  # which would have what is tokenised thrown away


def test_a_stream_whose_columns_show_only_in_its_rows(
    hub: tuple[dict[str, FakeDataSet], list[dict[str, object]]],
) -> None:
    there, _ = hub
    there["some/text"] = FakeDataSet(["body"])
    there["some/text"].column_names = None
    with pytest.raises(BadInput, match=r"hf:some/text, row 0: no field 'text'; it has: id, body"):
        read("hf:some/text")
