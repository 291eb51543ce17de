from __future__ import annotations

import json
from pathlib import Path

import pytest
from measuring import Results, command, ratios, spread, take_turns

HEAD = {"benchmark": "x", "rounds": 3}


def test_everyone_goes_first_in_turn() -> None:
    order: list[str] = []
    found = take_turns({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_spread_of_many_and_of_one() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0}
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]


def test_cut_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    first = Results(file, HEAD)
    first.add({"size": 1, "ms": 2.5})
    first.conclude("largest", 2.5)
    second = Results(file, HEAD)
    assert second.find(size=1) == {"size": 1, "ms": 2.5}
    assert second.find(size=2) is None
    second.add({"size": 2, "ms": 3.5})
    assert json.loads(file.read_text()) == {
        **HEAD,
        "summary": {"largest": 2.5},
        "rows": [{"size": 1, "ms": 2.5}, {"size": 2, "ms": 3.5}],
    }


def test_another_measurements_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    Results(file, HEAD).add({"size": 1})
    before = file.read_bytes()
    with pytest.raises(SystemExit, match="its rounds is 3, and this one's 5"):
        Results(file, HEAD | {"rounds": 5})
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["b.py", "--peer", "/x/nano", "--rounds", "1", "--out", "r.json"],
        ["b.py", "--peer=/x/nano/", "--rounds", "1", "--out=r.json"],
        ["b.py", "--out", "r.json", "--peer", "/x/../x/nano/", "--rounds", "1"],
    ],
)
def test_command_says_no_place(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", words)
    said = command(Path("/x/nano"), None)
    assert said.replace("=", " ") == "python b.py --peer PATH --rounds 1"
