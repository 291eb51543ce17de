"""Which windows of the data each step sees: pure functions of their arguments, in numpy alone.

A window is named by its start `s`: the inputs are tokens `s … s + context - 1`, the targets the same moved on by one,
so that a window needs `context + 1` tokens. Two orders:

    epochs   non-overlapping windows, each once per epoch, in a fresh permutation each epoch (`epoch_windows`)
    paper    the authors' tables of random starts, with replacement (`paper_windows`, `paper_eval_windows`),
             value for value, streamed from the generator and never stored

Every function may be called from any thread, in any order of steps; caches change the time, never the values.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qurve.errors import BadInput, did_you_mean

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

PAPER_STEPS = 600_000
PAPER_EVALUATIONS = 600
PAPER_EVAL_WINDOWS = 2_400
PAPER_SEED = 42

# ---------------------------------------------------------------------------------------------------------- epochs


def epoch_windows(n_tokens: int, step: int, *, context: int, sequences: int, seed: int) -> Int64s:
    """Starts `int64[sequences]` of step `step` (from 0), without replacement within an epoch.

    The windows are those at multiples of `context`. Each epoch visits them all once, in a permutation of its own; the
    epochs are laid end to end, and a step may reach from one into the next. Raises `BadInput` when there is no window.
    """
    n_windows = _count_windows(n_tokens, context)
    _check_step(step, sequences)
    at = np.arange(step * sequences, (step + 1) * sequences, dtype=np.int64)
    epochs, places = np.divmod(at, n_windows)
    windows = np.empty(sequences, dtype=np.int64)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        mine = epochs == epoch
        windows[mine] = _permuted(places[mine].astype(np.uint64), n_windows, seed, epoch)
    return windows * context


def fixed_eval_windows(n_tokens: int, *, context: int, count: int) -> Int64s:
    """Starts `int64[min(count, available)]` of evenly spread windows that do not overlap, in rising order."""
    available = _count_windows(n_tokens, context)
    if count < 1:
        raise BadInput(f"{count} evaluation windows cannot be evaluated; ask for at least 1")
    count = min(count, available)
    return np.arange(count, dtype=np.int64) * available // count * context


_ROUNDS = 8


def _permuted(indices: UInt64s, n: int, seed: int, epoch: int) -> UInt64s:
    """Where a seeded permutation of `range(n)` sends `indices`, without making the rest of it.

    A Feistel network is a permutation of all numbers of `2 * half` bits, whatever its round function; what it sends
    outside `range(n)` it sends on until it is inside ("cycle walking"), which leaves a permutation of `range(n)`. So a
    step costs the same at any place of any data. The round keys are Philox' raw words, the same in every numpy.
    """
    key = int.from_bytes(hashlib.sha256(f"order {seed} {epoch}".encode()).digest()[:16], "little")
    round_keys: UInt64s = np.random.Philox(key=key).random_raw(_ROUNDS)
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = indices
    outside = np.ones(len(indices), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        out = out.copy()
        out[outside] = (left << half) | right
        outside = out >= np.uint64(n)
    return out


def _mix(x: UInt64s) -> UInt64s:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ----------------------------------------------------------------------------------------------------------- paper


def paper_windows(
    n_tokens: int, step: int, *, context: int = 1024, sequences: int = 480, seed: int = PAPER_SEED
) -> Int64s:
    """Starts `int64[sequences]`: row `step` (from 0) of the table the authors trained from.

    The table is `torch.randint(n_tokens - context, (600_000, sequences), generator=Generator().manual_seed(seed))`.
    Raises `BadInput` for data shorter than one window and for steps the table has not.
    """
    high = _paper_range(n_tokens, context)
    _check_step(step, sequences)
    if step >= PAPER_STEPS:
        raise BadInput(f"step {step} is not in the paper's order, which has steps 0 to {PAPER_STEPS - 1}")
    return _randint(high, step * sequences, sequences, seed, skipped=0)


def paper_eval_windows(n_train: int, n_val: int, evaluation: int, split: str, *, context: int = 1024) -> Int64s:
    """Starts `int64[2400]` of the authors' evaluation number `evaluation` (training step // 1000) on `train` or `val`.

    One generator at seed 42 draws a (600, 2400) table over the training range, then one over the validation range.
    """
    high_train, high_val = _paper_range(n_train, context), _paper_range(n_val, context)
    if split not in ("train", "val"):
        raise BadInput(f"the paper evaluates no split {split!r}{did_you_mean(split, ('train', 'val'))}")
    if not 0 <= evaluation < PAPER_EVALUATIONS:
        raise BadInput(f"evaluation {evaluation} is not in the paper's order, which has 0 to {PAPER_EVALUATIONS - 1}")
    first = evaluation * PAPER_EVAL_WINDOWS
    if split == "train":
        return _randint(high_train, first, PAPER_EVAL_WINDOWS, PAPER_SEED, skipped=0)
    table = PAPER_EVALUATIONS * PAPER_EVAL_WINDOWS * _words(high_train)
    return _randint(high_val, first, PAPER_EVAL_WINDOWS, PAPER_SEED, skipped=table)


def _words(high: int) -> Literal[1, 2]:
    """How many 32-bit words PyTorch's CPU `randint(high)` draws for one value.

    From 2^28 on it joins two, the first being the high word, to keep the modulo's skew small. (Old releases did so from
    2^32 only; the paper's two ranges, nine thousand million and four million, fall on the same side in both.)
    """
    return 2 if high >= 1 << 28 else 1


def _randint(high: int, first: int, count: int, seed: int, *, skipped: int) -> Int64s:
    """Values `first … first + count - 1` of `randint(high)` after `skipped` words of the generator."""
    if seed < 0:
        raise BadInput(f"seed {seed}: the paper's order takes seeds from 0 up")
    words = _words(high)
    raw = _mersenne_words(seed & 0xFFFFFFFF, skipped, first * words, count * words)
    if words == 2:
        raw = (raw[0::2] << np.uint64(32)) | raw[1::2]
    return (raw % np.uint64(high)).astype(np.int64)


class _Cursor:
    """A Mersenne Twister that stands after the words it gave last."""

    def __init__(self, seed: int) -> None:
        self.bits = np.random.MT19937()
        state: Any = np.random.RandomState(seed).get_state(legacy=False)  # init_genrand, as PyTorch seeds
        self.bits.state = state
        self.position = 0
        self.start = -1
        self.given: UInt64s = np.empty(0, dtype=np.uint64)


_CURSORS = 4
_cursors: OrderedDict[tuple[int, int, int], _Cursor] = OrderedDict()
_cursors_lock = threading.Lock()


def _mersenne_words(seed: int, skipped: int, first: int, count: int) -> UInt64s:
    """`count` 32-bit words of MT19937, after `skipped + first` others.

    The few latest streams keep their place, so that the next step draws its own words only. A jump forward runs the
    generator over what lies between (about 3 ns a word), a jump back starts it anew.
    """
    stream, start = (seed, skipped, count), skipped + first
    with _cursors_lock:
        cursor = _cursors.pop(stream, None)
        if cursor is None or (start < cursor.position and start != cursor.start):
            cursor = _Cursor(seed)
        if start != cursor.start:
            cursor.bits.random_raw(start - cursor.position, output=False)
            cursor.given = cursor.bits.random_raw(count)
            cursor.start, cursor.position = start, start + count
        _cursors[stream] = cursor
        while len(_cursors) > _CURSORS:
            _cursors.popitem(last=False)
        return cursor.given


# ------------------------------------------------------------------------------------------------------------- both


def batch_sha(starts: npt.ArrayLike, fingerprint: str) -> str:
    """sha256 (hex) of a step's window starts as little-endian int64, followed by the data fingerprint's text."""
    return hashlib.sha256(np.asarray(starts, dtype="<i8").tobytes() + fingerprint.encode()).hexdigest()


def _count_windows(n_tokens: int, context: int) -> int:
    _check_context(context)
    if n_tokens < context + 1:
        raise BadInput(_too_short(n_tokens, context))
    return (n_tokens - 1) // context


def _paper_range(n_tokens: int, context: int) -> int:
    _check_context(context)
    if n_tokens < context + 1:
        raise BadInput(_too_short(n_tokens, context))
    return n_tokens - context


def _too_short(n_tokens: int, context: int) -> str:
    return (
        f"the data is too short: it has {n_tokens} tokens, and one window of context {context} needs {context + 1}; "
        "prepare more text, or take a shorter context"
    )


def _check_context(context: int) -> None:
    if context < 1:
        raise BadInput(f"context {context} is no window; it must be at least 1")


def _check_step(step: int, sequences: int) -> None:
    if step < 0:
        raise BadInput(f"step {step}: steps are counted from 0")
    if sequences < 1:
        raise BadInput(f"{sequences} sequences a step: there must be at least 1")
