"""Text -> shards of token ids and a manifest that says what they are.

A prepared folder holds `train-00000.bin …`, `val-…`, `test-…` (little-endian uint16 or uint32, every document followed
by one end-of-text id), `tokenizer.json` if the tokenizer was trained, and `manifest.json`, which appears last: without
it the folder is no data. What is under way lies in `.prepare-…` within it, and is taken up again by the same call.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from qurve.data import tokenizers
from qurve.data.loader import FORMAT, MANIFEST, SHARD_NAME, SPLITS, fingerprint_of, read_manifest
from qurve.data.progress import Progress
from qurve.data.sources import Sources
from qurve.errors import BadInput
from qurve.files import LOCK, claimed

SPLIT_SEED = 2357
NANOGPT_FRACTION = 0.0005
SHARD_TOKENS = 1 << 27
BUFFER_TOKENS = 1 << 20
CHUNK_CHARACTERS = 1 << 22
"""Text handed to a worker at a time, and what a killed preparation loses at most per worker."""

_WORK = ".prepare-"
_WORTH_PROCESSES = 32 << 20  # bytes of input; below, starting processes takes longer than the work

Int64s = npt.NDArray[np.int64]


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    tokenizer: str = "gpt2",
    split: float | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Tokenise the documents of `paths` into the folder `out`; returns its manifest.

    paths      files, folders, or hub data sets (see `qurve.data.sources`)
    tokenizer  `gpt2`, `bytes`, or `bpe:N`, trained on the training documents
    split      None: nanoGPT's rule, or the fraction of the documents that validation and test get each
               (see `split_documents`)
    workers    processes; by default one per core for inputs that are worth it. More than one calls for the usual
               `if __name__ == "__main__":` in the calling script. The result is the same for any number.
    progress   whether to report to stderr

    Memory does not grow with the input, but for 40 bytes or so a document; a single document must fit. Disk: the tokens
    twice until the end. Raises `BadInput`, with nothing left behind, for input that cannot be used, and for an `out`
    that holds anything else; when it holds the same data already, that is returned at once.
    """
    out = Path(out)
    tokenizers.check_spec(tokenizer)
    if split is not None and not 0 < split < 0.5:
        raise BadInput(f"split {split}: validation and test each get this fraction of the documents; try 0.05")
    if workers is not None and workers < 1:
        raise BadInput(f"{workers} workers: there must be at least 1")
    sources = Sources(paths, leave_out=out)
    request = {"format": FORMAT, "tokenizer": tokenizer, "split": split, "sources": sources.identity()}
    request_sha = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    if workers is None:
        workers = _cores() if sources.size >= _WORTH_PROCESSES or sources.streamed else 1

    def say(text: str) -> None:
        if progress:
            print(text, file=sys.stderr, flush=True)

    with _claimed(out):
        if (out / MANIFEST).exists():
            manifest = _same_or_refuse(out, request_sha, sources, tokenizer, split)
            _remove_unfinished(out)
            say(f"{out} holds this data already; nothing to do")
            return manifest
        work = out / f"{_WORK}{request_sha[:16]}"
        if not work.is_dir():
            _remove_unfinished(out)
            _refuse_foreign(out)
            work.mkdir()
        try:
            job = _Job(sources, work, _tokenizer(tokenizer, sources, split, work, progress), workers, progress)
            resumed = job.tokenise()
            if resumed:
                say(f"went on from {resumed} documents tokenised before")
            shards, counts = job.write_splits(split_documents(len(job.documents()), split))
        except BadInput:
            _remove_unfinished(out)
            raise
        manifest = {
            "format": FORMAT,
            "fingerprint": fingerprint_of(
                job.tokenizer.sha256, job.dtype.name, [s["sha256"] for name in SPLITS for s in shards[name]]
            ),
            "tokenizer": {"spec": tokenizer, "sha256": job.tokenizer.sha256, "end_of_text": job.tokenizer.eot},
            "n_ids": job.tokenizer.n_ids,
            "dtype": job.dtype.name,
            "splits": {name: {**counts[name], "shards": shards[name]} for name in SPLITS},
            "split_rule": _split_rule(split, counts),
            "dropped": [
                {"file": file, "reason": reason, "count": count} for (file, reason), count in sources.dropped.items()
            ],
            "sources": sources.content(),
            "request": request_sha,
        }
        for name in SPLITS:
            for shard in shards[name]:
                os.replace(work / shard["name"], out / shard["name"])
        job.tokenizer.save(out)
        _write_synced(work / MANIFEST, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        os.replace(work / MANIFEST, out / MANIFEST)
        shutil.rmtree(work)
        return manifest


def split_documents(n: int, fraction: float | None) -> dict[str, Int64s]:
    """Which of `n` documents, numbered in the order they were read, make up train, val and test, in written order.

    None is nanoGPT's rule, `train_test_split(test_size=0.0005, seed=2357, shuffle=True)` of Hugging Face's `datasets`:
    the first ceil(0.0005 n) of a seeded permutation are validation, the others training. Validation stays whole, and
    the test split is the second half of it (its last ceil(half) documents). A fraction gives validation and test that
    part each, at least one document, off the front of the same permutation, and training the rest.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(n)
    n_val = math.ceil((NANOGPT_FRACTION if fraction is None else fraction) * n)
    n_held = n_val if fraction is None else 2 * n_val
    if n_held >= n or not n_val:
        needs = (
            "nanoGPT's rule takes at least 2" if fraction is None else f"a fraction of {fraction} takes more of them"
        )
        raise BadInput(
            f"{n} document{'s' * (n != 1)} cannot be split: {needs}, since the splits are made by document; "
            "give the text as more files, or as .jsonl with one document a line"
        )
    val = order[:n_val]
    return {
        "train": order[n_held:],
        "val": val,
        "test": val[n_val // 2 :] if fraction is None else order[n_val:n_held],
    }


def _split_rule(fraction: float | None, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    documents = counts["test"]["documents"]
    if fraction is None:
        test = f"the last {documents} of the {counts['val']['documents']} validation documents, which stay in val too"
        return {"rule": "nanogpt", "seed": SPLIT_SEED, "val_fraction": NANOGPT_FRACTION, "test": test}
    return {"rule": "fraction", "seed": SPLIT_SEED, "fraction": fraction, "test": f"{documents} documents of its own"}


# ------------------------------------------------------------------------------------------------------ the folder


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Make the folder and keep other processes from preparing into it; a folder made for nothing goes again."""
    made = [place for place in (out, *out.parents) if not place.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be the output folder ({error.strerror}); give another --out") from None
    try:
        with claimed(out):
            yield
    except BadInput:
        for place in made:
            try:
                place.rmdir()
            except OSError:
                break  # not empty: not ours alone
        raise


def _same_or_refuse(
    out: Path, request_sha: str, sources: Sources, tokenizer: str, split: float | None
) -> dict[str, Any]:
    manifest = read_manifest(out)
    if manifest.get("request") == request_sha:
        return manifest
    # the same files may have moved, or been installed anew: then it is their content that decides
    same_kind = manifest["tokenizer"]["spec"] == tokenizer and manifest["split_rule"].get("fraction") == split
    before = [(source["bytes"], source["sha256"]) for source in manifest["sources"]]
    if same_kind and before == [(source["bytes"], source["sha256"]) for source in sources.content()]:
        return manifest
    raise BadInput(
        f"{out} holds other data already, which is never overwritten; give another --out, or remove it first"
    )


def _refuse_foreign(out: Path) -> None:
    for entry in out.iterdir():
        if entry.name != LOCK:
            raise BadInput(f"{out} is not empty (it holds {entry.name}); give another --out")


def _remove_unfinished(out: Path) -> None:
    """Remove what an unfinished preparation left in `out`; nothing where there is no sign of one."""
    unfinished = [entry for entry in out.iterdir() if entry.name.startswith(_WORK)]
    if unfinished and not (out / MANIFEST).exists():
        for entry in out.iterdir():
            if SHARD_NAME.fullmatch(entry.name) or entry.name == tokenizers.TOKENIZER_FILE:
                entry.unlink()
    for entry in unfinished:
        shutil.rmtree(entry)


def _write_synced(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as opened:
        opened.write(text)
        _sync(opened)


def _sync(opened: IO[Any]) -> None:
    opened.flush()
    os.fsync(opened.fileno())


# --------------------------------------------------------------------------------------------------------- the job


def _tokenizer(spec: str, sources: Sources, split: float | None, work: Path, progress: bool) -> tokenizers.Tokenizer:
    n_ids = tokenizers.check_spec(spec)
    if n_ids is None:
        return tokenizers.ready_made(spec)
    file = work / tokenizers.TOKENIZER_FILE
    if not file.exists():
        n_documents = sum(1 for _ in sources.documents())
        if n_documents == 0:
            raise _all_empty(sources)
        in_training = np.zeros(n_documents, dtype=bool)
        in_training[split_documents(n_documents, split)["train"]] = True

        def training_texts() -> Iterator[str]:
            with Progress(f"training {spec}", sources.size, on=progress) as bar:
                for text, wanted in zip(sources.documents(), in_training, strict=True):
                    if wanted:
                        yield text
                    bar.update(sources.done)

        tokenizers.train_bpe(n_ids, training_texts()).save(work)
    return tokenizers.load_trained(file)


def _all_empty(sources: Sources) -> BadInput:
    empty = sum(count for (_, reason), count in sources.dropped.items() if reason.startswith("empty"))
    first = sources.all[0].name
    return BadInput(f"there is no text: all {empty} documents are empty (the first in {first}); give other input")


class _Job:
    """Tokenising into `work`: tokens in the order read, a pair (tokens, bytes) per document, a journal of chunks."""

    def __init__(
        self, sources: Sources, work: Path, tokenizer: tokenizers.Tokenizer, workers: int, progress: bool
    ) -> None:
        self.sources, self.work, self.tokenizer = sources, work, tokenizer
        self.workers, self.progress = workers, progress
        self.dtype = np.dtype("<u2" if tokenizer.n_ids <= 1 << 16 else "<u4")
        self._tokens = work / "tokens.bin"
        self._documents = work / "documents.bin"
        self._journal = work / "journal.jsonl"

    def documents(self) -> Int64s:
        """`int64[n, 2]`: tokens (with the end of text) and bytes of each document."""
        return np.fromfile(self._documents, dtype="<i8").reshape(-1, 2)

    def tokenise(self) -> int:
        """Tokenise all chunks the journal does not hold yet; returns how many documents it held."""
        chunks, n_documents, n_tokens = self._resume()
        done_before = n_documents
        with ExitStack() as stack:
            tokens, documents = (stack.enter_context(open(file, "ab")) for file in (self._tokens, self._documents))
            journal = stack.enter_context(open(self._journal, "a", encoding="utf-8"))
            bar = stack.enter_context(Progress("tokenising", self.sources.size, on=self.progress))
            for ids, pairs, done in self._encoded(chunks):
                tokens.write(ids)
                documents.write(pairs)
                _sync(tokens)
                _sync(documents)
                n_documents += len(pairs) // 16
                n_tokens += len(ids) // self.dtype.itemsize
                journal.write(json.dumps({"documents": n_documents, "tokens": n_tokens}) + "\n")
                journal.flush()
                bar.update(done)
        if n_documents == 0:
            raise _all_empty(self.sources)
        return done_before

    def _resume(self) -> tuple[int, int, int]:
        """Chunks, documents and tokens that are whole; cuts off what was written after them."""
        lines: list[str] = []
        if self._journal.exists():
            lines = [line for line in self._journal.read_text().splitlines(keepends=True) if line.endswith("\n")]
        state = json.loads(lines[-1]) if lines else {"documents": 0, "tokens": 0}
        for file, size in (
            (self._tokens, state["tokens"] * self.dtype.itemsize),
            (self._documents, state["documents"] * 16),
            (self._journal, sum(map(len, lines))),
        ):
            if file.exists() and file.stat().st_size >= size:
                os.truncate(file, size)
            elif size:  # the disk lost what the journal says: begin again
                for stale in (self._journal, self._tokens, self._documents):
                    stale.unlink(missing_ok=True)
                return 0, 0, 0
        return len(lines), state["documents"], state["tokens"]

    def _encoded(self, skip: int) -> Iterator[tuple[bytes, bytes, int]]:
        """(token bytes, document pairs, input bytes read so far) of each chunk from number `skip` on, in order."""
        chunks = self._chunks(skip)
        if self.workers == 1:
            for texts, done in chunks:
                yield *_encode(self.tokenizer, self.dtype.str, texts), done
            return
        waiting: deque[tuple[Future[tuple[bytes, bytes]], int]] = deque()
        pool = ProcessPoolExecutor(
            self.workers,
            multiprocessing.get_context("spawn"),
            _start_worker,
            (self.tokenizer.spec, str(self.work / tokenizers.TOKENIZER_FILE)),
        )
        try:
            for texts, done in chunks:
                waiting.append((pool.submit(_encode_in_worker, self.dtype.str, texts), done))
                if len(waiting) > 2 * self.workers:  # so many chunks are in memory, and no more
                    first, read = waiting.popleft()
                    yield *first.result(), read
            for future, read in waiting:
                yield *future.result(), read
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(self, skip: int) -> Iterator[tuple[list[str], int]]:
        """Runs of documents, cut where they pass a size: the same cuts in every run over the same input."""
        texts: list[str] = []
        size = number = 0
        for text in self.sources.documents():
            texts.append(text)
            size += len(text)
            if size >= CHUNK_CHARACTERS:
                if number >= skip:
                    yield texts, self.sources.done
                texts, size, number = [], 0, number + 1
        if texts and number >= skip:
            yield texts, self.sources.size

    def write_splits(
        self, splits: dict[str, Int64s]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, int]]]:
        """Write each split's shards into `work`; returns the shards and the counts of each split."""
        documents = self.documents()
        ends = np.cumsum(documents[:, 0])
        counts = {
            name: {"documents": len(of), "tokens": int(documents[of, 0].sum()), "bytes": int(documents[of, 1].sum())}
            for name, of in splits.items()
        }
        shards = {}
        size = self.dtype.itemsize
        total = sum(count["tokens"] for count in counts.values()) * size
        # Read, not mapped: mapped pages stay with the process until memory is short.
        with open(self._tokens, "rb") as tokens, Progress("writing", total, on=self.progress) as bar:
            done = 0

            def wrote(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                bar.update(done)

            for name, of in splits.items():
                with _ShardWriter(self.work, name, self.dtype, wrote) as writer:
                    for end, length in zip(ends[of], documents[of, 0], strict=True):
                        tokens.seek(size * (end - length))
                        writer.add(np.frombuffer(tokens.read(size * length), dtype=self.dtype))
                shards[name] = writer.shards
        return shards, counts


class _ShardWriter:
    """Writes tokens into `NAME-00000.bin`, `NAME-00001.bin`, …, each of at most `SHARD_TOKENS` tokens."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], wrote: Callable[[int], None]) -> None:
        self.shards: list[dict[str, Any]] = []
        self._folder, self._name, self._dtype, self._wrote = folder, name, dtype, wrote
        self._buffer = np.empty(BUFFER_TOKENS, dtype=dtype)
        self._filled = 0  # of the buffer
        self._in_shard = 0
        self._file: IO[bytes] | None = None

    def add(self, ids: npt.NDArray[Any]) -> None:
        at = 0
        while at < len(ids):
            room = min(len(self._buffer) - self._filled, SHARD_TOKENS - self._in_shard - self._filled)
            part = ids[at : at + room]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            at += len(part)
            if len(part) == room:
                self._flush()

    def _flush(self) -> None:
        if self._filled:
            if self._file is None:
                self._digest = hashlib.sha256()
                self._file = open(self._folder / self._shard_name(), "wb")  # noqa: SIM115 (closed when full)
            data = self._buffer[: self._filled].tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._wrote(len(data))
            self._in_shard += self._filled
            self._filled = 0
        if self._in_shard == SHARD_TOKENS:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()
            self.shards.append(
                {"name": self._shard_name(), "tokens": self._in_shard, "sha256": self._digest.hexdigest()}
            )
            self._file, self._in_shard = None, 0

    def _shard_name(self) -> str:
        return f"{self._name}-{len(self.shards):05d}.bin"

    def __enter__(self) -> _ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()
            self._finish_shard()
        elif self._file is not None:
            self._file.close()


# --------------------------------------------------------------------------------------------------------- workers

_worker_tokenizer: tokenizers.Tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, dtype: str, texts: list[str]) -> tuple[bytes, bytes]:
    """Token bytes of the texts, an end of text after each, and the (tokens, bytes) pairs as int64 bytes."""
    eot = np.array([tokenizer.eot], dtype=np.uint32)
    encoded = tokenizer.encode_batch(texts)
    ids = np.concatenate([part for one in encoded for part in (one, eot)]).astype(dtype)
    pairs = [(len(one) + 1, len(text.encode())) for one, text in zip(encoded, texts, strict=True)]
    return ids.tobytes(), np.array(pairs, dtype="<i8").tobytes()


def _encode_in_worker(dtype: str, texts: list[str]) -> tuple[bytes, bytes]:
    return _encode(_worker_tokenizer, dtype, texts)


def _start_worker(spec: str, trained: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops, and with it the workers
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    if tokenizers.check_spec(spec) is None:
        _worker_tokenizer = tokenizers.ready_made(spec)
    else:
        _worker_tokenizer = tokenizers.load_trained(Path(trained))


def _leave_with_parent() -> None:
    """A killed parent leaves no workers behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
