"""`qurve prepare` against nanoGPT's route over the Hugging Face package `datasets`: the same text, the same cores.

    python benchmarks/prepare_cpu.py [--text FILE.jsonl…]

Theirs, in the manner of its `prepare.py`: the file is loaded as a data set, `map` calls tiktoken on each document in as
many processes as there are cores, and a loop writes the ids into a mapped file. Ours is `prepare`, with as many
processes. Each run is a process of its own, with an empty cache, and times itself from the text's file on; theirs also
without the loading, which is nanoGPT's download, and it is that shorter time that is compared. First both must give
the same tokens on a small file. The sides take turns, in an order that alternates; ratios are taken within a round.

Memory is measured in runs of their own, which are not timed: the largest sum over a side's processes of what is theirs
(anonymous pages; what is shared is divided by its sharers), and the same with mapped files. A text ten times as long
shows whether it grows. Prints a table, then one JSON line. Needs Linux.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qurve.data.corpus import embedded_corpus
from qurve.data.loader import TokenData
from qurve.data.prepare import prepare
from qurve.data.sources import Sources

SPLITS = ("train", "val")
CHECKED_MEGABYTES = 4.0
LARGE = 10
"""How many times as long the text is that memory is compared on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", type=Path, nargs="+", help="documents, one a line; by default the embedded corpus, cut at paragraphs"
    )
    parser.add_argument("--megabytes", type=float, default=100, help="of text, repeated document by document to fill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where to work; by default the system's folder for such things")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:  # one run of one side, in a process of its own
        print(json.dumps(SIDES[options.side](options.text[0], options.folder, options.workers)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _race(options, Path(folder))


def _race(options: argparse.Namespace, folder: Path) -> None:
    def run(side: str, text: Path, watch: bool = False) -> dict[str, Any]:
        command = [sys.executable, __file__, "--side", side, "--text", text]
        command += ["--folder", folder / side, "--workers", str(options.workers)]
        return _run(command, folder / side, watch)

    from measuring import machine, ratios, spread, take_turns  # here, since the sides' processes shall not load torch

    _same_tokens(run, write_text(options.text, CHECKED_MEGABYTES, folder / "small.jsonl")[0], folder)
    text, counts = write_text(options.text, options.megabytes, folder / "text.jsonl")
    memory = {side: {"once": run(side, text, watch=True)["memory"]} for side in SIDES}
    runs = take_turns({side: partial(run, side, text) for side in SIDES}, options.rounds)
    text.unlink()
    large, large_counts = write_text(options.text, LARGE * options.megabytes, folder / "large.jsonl")
    large_run = run("qurve", large, watch=True)
    memory["qurve"]["large"] = large_run["memory"]

    loading = {side: [one["seconds"] for one in of] for side, of in runs.items()}
    seconds = {side: [one["seconds"] - one.get("loading", 0.0) for one in of] for side, of in runs.items()}
    found = {
        "ratio_to_nanogpt": ratios(seconds["nanogpt"], seconds["qurve"]),
        "ratio_with_loading": ratios(loading["nanogpt"], loading["qurve"]),
    }
    speeds = {side: [counts["bytes"] / one / 1e6 for one in of] for side, of in seconds.items()}
    print("                          median     low    high   peak MB   with mapped files")
    for side, of in speeds.items():
        at, peak = spread(of), memory[side]["once"]["peak"]
        print(
            f"{side + ', MB/s':>22}  {at['median']:8.2f}{at['low']:8.2f}{at['high']:8.2f}"
            f"  {peak['own'] / 1e6:8.0f}  {peak['mapped'] / 1e6:18.0f}"
        )
    for name, of in found.items():
        at = spread(of)
        print(f"{name:>22}  {at['median']:8.3f}{at['low']:8.3f}{at['high']:8.3f}")
    peak, once = memory["qurve"]["large"]["peak"], memory["qurve"]["once"]["peak"]
    print(
        f"{large_counts['bytes'] / 1e6:.0f} MB of text: {large_counts['bytes'] / large_run['seconds'] / 1e6:.2f} MB/s, "
        f"peak {peak['own'] / 1e6:.0f} MB ({peak['mapped'] / 1e6:.0f} with mapped files)"
    )
    text_option = " --text FILE.jsonl" if options.text else ""
    print(
        json.dumps(
            {
                "benchmark": "prepare_cpu",
                "command": f"python benchmarks/prepare_cpu.py{text_option} --megabytes {options.megabytes:g} "
                f"--rounds {options.rounds} --workers {options.workers}",
                "machine": machine("cpu"),
                "workers": options.workers,
                **{name: spread(of) for name, of in found.items()},
                "megabytes_per_s": {side: spread(of) for side, of in speeds.items()},
                "memory_growth": peak["own"] / once["own"],
                "memory": memory,
                "text": counts,
                "large": {**large_counts, "seconds": large_run["seconds"]},
                "rounds": found,
                "runs": runs,
            }
        )
    )


# ------------------------------------------------------------------------------------------------------- the two sides


def _ours(text: Path, folder: Path, workers: int) -> dict[str, float]:
    started = time.perf_counter()
    prepare([text], folder, workers=workers, progress=False)
    return {"seconds": time.perf_counter() - started}


def _theirs(text: Path, folder: Path, workers: int) -> dict[str, float]:
    import datasets
    import tiktoken.registry

    from qurve.data import tokenizers

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    encoding = tokenizers.ready_made("gpt2")._encoding  # tiktoken's own object, made without a network
    tiktoken.registry.ENCODINGS["gpt2"] = encoding  # as if tiktoken had fetched it: its processes take it by name

    def tokenise(example: dict[str, Any]) -> dict[str, Any]:
        ids = [*encoding.encode_ordinary(example["text"]), encoding.eot_token]
        return {"ids": ids, "length": len(ids)}

    started = time.perf_counter()
    documents = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(folder / "cache"))
    loaded = time.perf_counter()
    splits = documents.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    tokenised = splits.map(tokenise, remove_columns=["text"], num_proc=workers)
    for name, of in zip(SPLITS, (tokenised["train"], tokenised["test"]), strict=True):
        size = int(np.sum(of["length"], dtype=np.uint64))
        mapped = np.memmap(folder / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(size,))
        parts = min(1024, len(of))
        at = 0
        for part in range(parts):
            shard = of.shard(num_shards=parts, index=part, contiguous=True).with_format("numpy")
            ids = np.concatenate(shard["ids"])
            mapped[at : at + len(ids)] = ids
            at += len(ids)
        mapped.flush()
    done = time.perf_counter()
    return {"seconds": done - started, "loading": loaded - started}


SIDES = {"qurve": _ours, "nanogpt": _theirs}


def _run(command: list[Any], folder: Path, watch: bool) -> dict[str, Any]:
    """What one run of a side says of itself, in an empty folder; `memory` too, if it is watched."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder.parent / "hub")}
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=offline) as process:
        samples = []
        while watch and process.poll() is None:
            samples.append(_memory(process.pid))
            time.sleep(0.05)
        said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run failed: {' '.join(map(str, command[2:4]))}")
    return {**json.loads(said.splitlines()[-1]), **({"memory": _over_time(samples)} if watch else {})}


def _over_time(samples: list[dict[str, int]]) -> dict[str, Any]:
    """The largest of each, and the median of `own` in each tenth of the time."""
    own = [one["own"] for one in samples]
    tenths = [own[len(own) * at // 10 : len(own) * (at + 1) // 10] for at in range(10)]
    return {
        "peak": {name: max(one[name] for one in samples) for name in samples[0]},
        "own_by_tenth": [int(statistics.median(of)) for of in tenths if of],
    }


def _memory(process: int) -> dict[str, int]:
    """Bytes of a process and all that it started: `own` (anonymous pages), `mapped` (with files that are mapped)."""
    sizes = {"own": 0, "mapped": 0}
    try:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            field, _, value = line.partition(":")
            if field == "Pss":
                sizes["mapped"] += 1024 * int(value.split()[0])
            if field == "Pss_Anon":
                sizes["own"] += 1024 * int(value.split()[0])
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, ProcessLookupError):  # it has ended meanwhile
        return sizes
    for child in map(int, children):
        of_child = _memory(child)
        sizes = {name: sizes[name] + of_child[name] for name in sizes}
    return sizes


# ------------------------------------------------------------------------------------------------------------ the text


def write_text(given: list[Path] | None, megabytes: float, into: Path) -> tuple[Path, dict[str, int]]:
    """A file of so many megabytes of text, one document a line, the given ones repeated as often as it takes."""
    size = documents = 0
    with open(into, "w", encoding="utf-8") as file:
        for text in itertools.chain.from_iterable(_documents(given) for _ in itertools.count()):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(text.encode())
            documents += 1
            if size >= megabytes * 1e6:
                return into, {"bytes": size, "documents": documents}
    raise AssertionError


def _documents(given: list[Path] | None) -> Iterator[str]:
    """The documents; the embedded corpus's are cut into some of a web page's length."""
    if given:
        yield from Sources(given).documents()
        return
    for speech in Sources([embedded_corpus()]).documents():
        page = ""
        for paragraph in speech.splitlines(keepends=True):
            page += paragraph
            if len(page) >= 5000:
                yield page
                page = ""
        if page:
            yield page


def _same_tokens(run: Any, text: Path, folder: Path) -> None:
    for side in SIDES:
        run(side, text)
    data = TokenData.open(folder / "qurve")
    for name in SPLITS:
        theirs = np.fromfile(folder / "nanogpt" / f"{name}.bin", dtype=np.uint16)
        inputs, targets = data.split(name).windows(np.array([0]), len(data.split(name)) - 1)
        if not np.array_equal([*inputs[0], targets[0, -1]], theirs):
            raise SystemExit(f"the two sides do not give the same tokens: {name}")


if __name__ == "__main__":
    main()
