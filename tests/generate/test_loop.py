"""Making text: equal to full forward passes, alone and in a batch; how texts end; what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import qurve
from combinations import Row, config_of, covering_array, factors, words
from qurve.data.tokenizers import ready_made
from qurve.errors import BadInput, QurveError
from qurve.generate import Generated, Sampling, generate, loop, stream
from qurve.generate.decoder import Decoder
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.model.init import stream_seed
from qurve.model.positions import NoPositions, Rope
from qurve.model.residual import Skip
from qurve.zoo.linear_attention import LinearAttention

GREEDY, DRAWN = Sampling(temperature=0), Sampling(1.2, 0.9, top_k=20, top_p=0.95, seed=3)
TINY = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=20, context=12, vocab_size=29)
PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2]]
IN_DECODING = ("mixer", "residual", "positions", "heads", "mlp", "attends")
PLACES = [place for place, name in enumerate(factors()) if name in IN_DECODING]
BYTES, GPT2 = ready_made("bytes"), ready_made("gpt2")


def handful() -> list[Any]:
    """Few rows that can decode and hold every mixer, residual scheme, kind of positions, of heads and of masks."""
    rows = [row for row in covering_array()[0] if config_of(row).attends != "bidirectional"]
    open_options = {(place, row[place]) for row in rows for place in PLACES}
    chosen: list[Row] = []
    while open_options:
        chosen.append(max(rows, key=lambda row: len(open_options & set(enumerate(row)))))
        open_options -= set(enumerate(chosen[-1]))
    return [pytest.param(row, id=words(row)) for row in chosen]


def model_of(config: ModelConfig) -> GPT:
    """In evaluation, with matrices so large that no two tokens are equally likely."""
    model, generator = GPT(config, seed=1).eval(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn(parameter.shape, generator=generator)
    return model


def plain(model: GPT, prompt: list[int], new: int, sampling: Sampling, sample: int = 0) -> list[int]:
    """The new ids from full forward passes over all that is there; beyond the context, by the policy `slide`."""
    context, ids, first = model.config.context, list(prompt), 0
    chance = torch.Generator().manual_seed(stream_seed(sampling.seed, f"generate/{sample}/{prompt}"))
    for _ in range(new):
        if len(ids) - first > context:
            first = len(ids) - max(1, context // 2)
        more = {"prefix_B": torch.tensor([len(prompt)])} if model.config.attends == "prefix" else {}
        with torch.no_grad():
            logits_BV = model(torch.tensor([ids[first:]]), **more)[:, -1]
        seen_BV = torch.zeros_like(logits_BV, dtype=torch.bool)
        seen_BV[0, ids] = True
        ids += sampling.choose(logits_BV, seen_BV, [chance])
    return ids[len(prompt) :]


def new_ids(results: list[Generated]) -> list[list[int]]:
    return [list(made.ids) for made in results]


# ----------------------------------------------------------------------------------------- equal to the full forward


@pytest.mark.parametrize("row", handful())
def test_it_is_the_full_forward_alone_and_in_a_batch_of_mixed_lengths(row: Row) -> None:
    model = model_of(config_of(row))
    for sampling in (GREEDY, DRAWN):
        expected = [plain(model, prompt, 9, sampling) for prompt in PROMPTS]
        assert new_ids(generate(model, PROMPTS, sampling=sampling, max_new_tokens=9)) == expected
        assert new_ids(generate(model, PROMPTS[:1], sampling=sampling, max_new_tokens=9)) == expected[:1]


def test_a_prompt_that_is_read_in_chunks_is_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(dataclasses.replace(TINY, context=40))
    expected = new_ids(generate(model, PROMPTS, sampling=DRAWN, max_new_tokens=20))
    monkeypatch.setattr(loop, "CHUNK", 5)
    assert new_ids(generate(model, PROMPTS, sampling=DRAWN, max_new_tokens=20)) == expected


def test_the_prompt_of_a_prefix_model_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHUNK", 5)
    model = model_of(dataclasses.replace(TINY, attends="prefix", context=40))
    expected = [plain(model, prompt, 9, DRAWN) for prompt in PROMPTS]
    assert new_ids(generate(model, PROMPTS, sampling=DRAWN, max_new_tokens=9)) == expected


def test_bf16_is_the_models_own_under_autocast() -> None:
    model = model_of(dataclasses.replace(TINY, context=40))
    made = generate(model, PROMPTS, sampling=GREEDY, max_new_tokens=1, dtype=torch.bfloat16)
    for prompt, one in zip(PROMPTS, made, strict=True):
        with torch.no_grad():
            logits_V = model(torch.tensor([prompt]))[0, -1]
        assert logits_V[one.ids[0]] > logits_V.max() - 0.05 * logits_V.norm()


# -------------------------------------------------------------------------------------------------- beyond the context


@pytest.mark.parametrize("context", [1, 2, 12, 13])
@pytest.mark.parametrize(
    "changes",
    [{}, {"positions": Rope()}, {"positions": NoPositions(), "mixer": LinearAttention()}, {"window": 3}],
    ids=["learned", "rope", "sums", "window"],
)
def test_sliding_reads_the_last_half_anew(changes: dict[str, Any], context: int) -> None:
    model = model_of(dataclasses.replace(TINY, **changes, context=context, d_head=4))
    prompts = [prompt[:context] for prompt in PROMPTS]
    expected = [plain(model, prompt, 31, DRAWN) for prompt in prompts]
    made = generate(model, prompts, sampling=DRAWN, max_new_tokens=31, beyond="slide")
    assert new_ids(made) == expected
    assert {one.why for one in made} == {"length"}


def test_a_prompt_beyond_the_context_is_read_as_if_its_end_had_been_made() -> None:
    model = model_of(TINY)
    (long,) = generate(model, [[5, 3]], sampling=GREEDY, max_new_tokens=40, beyond="slide")
    for known in (12, 13, 21, 33):
        prompt = [5, 3, *long.ids[:known]]
        (rest,) = generate(model, [prompt], sampling=GREEDY, max_new_tokens=40 - known, beyond="slide")
        assert rest.ids == long.ids[known:]


def test_without_a_number_texts_fill_the_context_each_its_own() -> None:
    """Also the shorter ones of a batch, whose padding takes no room from them once the longer ones have ended."""
    model = model_of(TINY)
    prompts = [PROMPTS[0], PROMPTS[1][:9], PROMPTS[2]]
    made = generate(model, prompts, sampling=DRAWN)
    assert [(one.why, len(one.ids)) for one in made] == [("context", 9), ("context", 3), ("context", 11)]
    assert new_ids(made) == [plain(model, prompt, 12 - len(prompt), DRAWN) for prompt in prompts]


def test_the_last_place_of_the_context_can_be_filled() -> None:
    model = model_of(TINY)
    assert generate(model, [[1] * 11])[0].why == "context"
    assert generate(model, [[1] * 11], max_new_tokens=1)[0].why == "length"


# ----------------------------------------------------------------------------------------------------------- the seeds


def test_a_seed_gives_the_same_text_and_another_one_another() -> None:
    model = model_of(dataclasses.replace(TINY, context=40))
    seeds = (1, 1, 2)
    first, again, other = (generate(model, PROMPTS, sampling=Sampling(seed=s), max_new_tokens=20) for s in seeds)
    assert first == again
    assert all(one.ids != two.ids for one, two in zip(first, other, strict=True))


def test_samples_differ_and_are_what_they_are_alone() -> None:
    model = model_of(dataclasses.replace(TINY, context=40))
    made = generate(model, PROMPTS, sampling=DRAWN, max_new_tokens=15, samples=3)
    assert [(one.prompt, one.sample) for one in made] == [(p, s) for p in range(3) for s in range(3)]
    assert len({one.ids for one in made}) == 9
    assert new_ids(made) == [plain(model, PROMPTS[p], 15, DRAWN, s) for p in range(3) for s in range(3)]


# ---------------------------------------------------------------------------------------- scripts in the model's place


class Scripted:
    """A decoder whose sequences go as in a script: the n-th token of its text, whatever was drawn before."""

    script: list[list[int]]
    """The new tokens, for each prompt."""
    reads: list[tuple[int, int]]
    """Shape of all that was read."""
    unlikely: float = -30.0

    def __init__(self, model: GPT, batch: int, padding_B: Tensor | None, *_: Any, compile: bool) -> None:
        self.rows, self.at, self.filled, self.vocabulary = list(range(batch)), -1, 0, model.config.vocab_size

    def read(self, ids_BT: Tensor) -> Tensor:
        self.reads.append(tuple(ids_BT.shape))
        self.at, self.filled = self.at + 1, self.filled + ids_BT.shape[1]
        logits_BV = torch.full((len(self.rows), self.vocabulary), self.unlikely)
        for place, row in enumerate(self.rows):
            logits_BV[place, self.script[row][self.at]] = 30.0
        return logits_BV

    def select(self, rows_K: Tensor) -> None:
        self.rows = [self.rows[row] for row in rows_K.tolist()]


Scripting = Callable[..., type[Scripted]]
WIDE = dataclasses.replace(TINY, vocab_size=320, context=64)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripting:
    def use(*script: list[int], likely: float = -30.0) -> type[Scripted]:
        decoder = type("Decoder", (Scripted,), {"script": list(script), "reads": [], "unlikely": likely})
        monkeypatch.setattr(loop, "Decoder", decoder)
        return decoder

    return use


def model_for(tokenizer: Any = BYTES) -> GPT:
    with torch.device("meta"):
        model = GPT(dataclasses.replace(WIDE, vocab_size=-(-tokenizer.n_ids // 64) * 64)).eval()
    return model.to_empty(device="cpu")


def said(text: str) -> list[int]:
    return list(text.encode())


def test_each_text_ends_for_its_own_reason_and_costs_nothing_then(scripted: Scripting) -> None:
    decoder = scripted(said("one. more"), [*said("tw"), 256, 0], said("three is longer"))
    made = generate(model_for(), ["a", "bcd", "ef"], tokenizer=BYTES, stop=[". "], max_new_tokens=10, sampling=GREEDY)
    assert [(one.text, one.why) for one in made] == [("one", "stop"), ("tw", "end"), ("three is l", "length")]
    assert [bytes(one.ids) for one in made[::2]] == [b"one. ", b"three is l"]
    assert made[1].ids == (*said("tw"), 256)
    assert decoder.reads == [(3, 3), *[(3, 1)] * 2, *[(2, 1)] * 2, *[(1, 1)] * 5]


def test_each_prompt_is_read_once_for_all_of_its_samples(scripted: Scripting) -> None:
    decoder = scripted(said("one"), said("two"))
    made = generate(model_for(), ["a", "bc"], tokenizer=BYTES, samples=3, max_new_tokens=3)
    assert [one.text for one in made] == ["one"] * 3 + ["two"] * 3
    assert decoder.reads == [(2, 2), (6, 1), (6, 1)]


def test_pieces_are_the_whole_and_come_side_by_side(scripted: Scripting) -> None:
    scripted(said("naïve 🙂 en"), said("a e!"))
    pieces = list(stream(model_for(), ["x", "y"], tokenizer=BYTES, stop=["en", "!"], samples=1))
    for prompt, text in enumerate(["naïve 🙂 ", "a e"]):
        mine = [piece for piece in pieces if piece.prompt == prompt]
        assert "".join(piece.text for piece in mine) == text
        assert [piece.result is None for piece in mine] == [True] * (len(mine) - 1) + [False]
        result = mine[-1].result
        assert result is not None
        assert (result.text, result.why) == (text, "stop")
        assert result.ids == tuple(piece.id for piece in mine)
        assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in mine)
    assert [piece.prompt for piece in pieces[:4]] == [0, 1, 0, 1]


def test_what_was_held_back_comes_when_the_text_ends_otherwise(scripted: Scripting) -> None:
    scripted(said("the e"), [*said("th"), 256], [*said("t"), 0xC3])
    made = generate(model_for(), ["a"] * 3, tokenizer=BYTES, stop=["the end"], max_new_tokens=2)
    assert [(one.text, one.why) for one in made] == [("th", "length"), ("th", "length"), ("t\ufffd", "length")]
    made = generate(model_for(), ["a"] * 2, tokenizer=BYTES, stop=["the end"], max_new_tokens=3)
    assert [(one.text, one.why) for one in made] == [("the", "length"), ("th", "end")]


def test_stop_ids_may_be_others_or_none(scripted: Scripting) -> None:
    scripted([5, 256, 7, 8])
    model = model_for()
    assert generate(model, ["a"], tokenizer=BYTES, stop_ids=[7, 9])[0].ids == (5, 256, 7)
    (made,) = generate(model, ["a"], tokenizer=BYTES, stop_ids=(), max_new_tokens=4)
    assert (made.ids, made.why, made.text) == ((5, 256, 7, 8), "length", "\x05<|endoftext|>\x07\x08")
    (made,) = generate(model, [[3]], max_new_tokens=4)  # no tokenizer: no text, and no end of text
    assert (made.ids, made.text) == ((5, 256, 7, 8), "")


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=50.0), Sampling(top_p=0.99)])
@pytest.mark.parametrize("tokenizer", [BYTES, GPT2], ids=lambda tokenizer: tokenizer.spec)
def test_padded_ids_are_never_made(scripted: Scripting, tokenizer: Any, sampling: Sampling) -> None:
    """Though the model finds one of them by far the likeliest."""
    model = model_for(tokenizer)
    scripted([model.config.vocab_size - 1] * 40)
    (made,) = generate(model, ["a"], tokenizer=tokenizer, sampling=sampling, max_new_tokens=40, stop_ids=())
    assert max(made.ids) < tokenizer.n_ids < model.config.vocab_size


def test_the_penalty_is_for_what_was_in_the_prompt_and_the_text(scripted: Scripting) -> None:
    scripted([5] * 3, [5] * 3, likely=20.0)  # 5 has 30, all others 20
    made = generate(model_for(), [[5], [6, 0]], sampling=Sampling(2.0, temperature=0), max_new_tokens=3)
    assert [one.ids for one in made] == [(0, 1, 2), (5, 1, 2)]


def test_an_empty_text_begins_a_document(scripted: Scripting) -> None:
    decoder = scripted(said("x"), said("y"))
    made = generate(model_for(), ["", [256]], tokenizer=BYTES, max_new_tokens=1)
    assert [one.text for one in made] == ["x", "y"]
    assert decoder.reads == [(2, 1)]


def test_damaged_weights_are_told_of() -> None:
    model = model_of(TINY)
    with torch.no_grad():
        model.token_embedding.weight[3] = torch.nan
    with pytest.raises(QurveError, match="logits are not finite"):
        generate(model, [[3]], max_new_tokens=1)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (
            [[1] * 10],
            {"max_new_tokens": 3},
            r"1 has 10 tokens; with 3 new ones that is 13, .* holds 12: ask for ",
        ),
        ([[1], [1] * 10], {"max_new_tokens": 3}, r"prompt 2 has 10 tokens.*at most 2 new tokens, or let the context"),
        ([[1] * 12], {}, r"prompt 1 has 12 tokens, and the model's context holds 12: shorten it, or"),
        ([[1]], {"beyond": "slide"}, "such a text need not end; give max_new_tokens"),
        ([[1]], {"beyond": "slip"}, "beyond = 'slip'; did you mean 'slide'"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens = 0: it must be a whole number, at least 1"),
        ([[1]], {"samples": 0}, "samples = 0: it must be a whole number, at least 1"),
        ([[1]], {"stop": "x"}, "stop = 'x': it must be a list"),
        ([[1]], {"stop": [""]}, "none of them empty"),
        ([[1]], {"stop": ["x"]}, "stop strings are found in text: give the tokenizer, or stop_ids"),
        ([], {}, "there are no prompts"),
        ([[]], {}, "prompt 1 has no ids; begin a document"),
        ("abc", {}, "prompts must be a list of texts, or of lists of ids"),
        ([1, 2], {}, "prompts must be a list of texts, or of lists of ids"),
        ([[1], [2, 29]], {}, "prompt 2 has the id 29; they are 0 to 28"),
        ([[-1]], {}, "prompt 1 has the id -1"),
        (["abc"], {}, "prompt 1 is a text: give the tokenizer"),
        ({"a": 1}, {}, "prompts must be a list of texts"),
        (b"ab", {}, "prompts must be a list of texts"),
        ([b"ab"], {}, "prompts must be a list of texts"),
        ([[1.9]], {}, r"prompt 1 has 1\.9 where an id, a whole number"),
        ([["1", "2"]], {}, "prompt 1 has '1' where an id"),
        ([[None]], {}, "prompt 1 has None where an id"),
        ([[1]], {"max_new_tokens": 2.5}, r"max_new_tokens = 2\.5: it must be a whole number"),
        ([[1]], {"stop_ids": 5}, "stop_ids = 5: it must be a list"),
        ([[1]], {"dtype": torch.int8}, "dtype = torch.int8: it must be torch.float32 or"),
        ([[1], [2]], {"compile": True}, "compile: on a CPU it is for one sequence at a time, not for 2"),
        ([[1]], {"compile": True, "samples": 3}, "one sequence at a time, not for 3"),
        ([[1]], {"tokenizer": BYTES}, "tokenizer bytes has 257 ids, the model's vocabulary only 29"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    prompts: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Decoder", None)
    with pytest.raises(BadInput, match=message):
        stream(model_of(TINY), prompts, **options)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"attends": "bidirectional"}, {}, "a bidirectional model sees the tokens to come"),
        ({"attends": "prefix"}, {"beyond": "slide", "max_new_tokens": 3}, "a prefix model's prompt is its prefix"),
        ({"mixer": LinearAttention()}, {"compile": True}, "compile: it is for softmax attention .* leave it out"),
    ],
)
def test_models_that_cannot_are_refused(changes: Any, options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        stream(model_of(dataclasses.replace(TINY, **changes)), [[1]], **options)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_compiling_and_dtype_are_for_the_decoder_and_for_each_that_sliding_makes(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled in the decoder's own tests."""
    wanted: list[tuple[torch.dtype, bool]] = []

    def decoder(*arguments: Any, compile: bool) -> Decoder:
        made = Decoder(*arguments)
        wanted.append((made.dtype, compile))
        return made

    monkeypatch.setattr(loop, "Decoder", decoder)
    options: dict[str, Any] = {"beyond": "slide", "max_new_tokens": 15, "sampling": GREEDY, "dtype": dtype}
    expected = generate(model_of(TINY), [[1]], **options)
    assert generate(model_of(TINY), [[1]], **options, compile=True) == expected
    kept = dtype or torch.float32
    assert wanted == [(kept, False), (kept, False), (kept, True), (kept, True)]


def test_whether_it_can_be_compiled_is_asked_for_the_dtype_that_is_wanted() -> None:
    """Norms that stand after the sums would see them narrow."""
    model = model_of(dataclasses.replace(TINY, residual=Skip(norms="post")))
    stream(model, [[1]], compile=True)
    with pytest.raises(BadInput, match="compile: "):
        stream(model, [[1]], compile=True, dtype=torch.bfloat16)
    stream(model.bfloat16(), [[1]], compile=True)
    with pytest.raises(BadInput, match="compile: "):
        stream(model, [[1]], compile=True, dtype=torch.float32)


def test_prompts_and_their_ids_may_come_one_by_one_and_of_any_library() -> None:
    expected = generate(model_of(TINY), [[1, 2], [3]], sampling=GREEDY, max_new_tokens=3)
    given = (ids for ids in (torch.tensor([1, 2]), iter([3])))
    assert generate(model_of(TINY), given, sampling=GREEDY, max_new_tokens=3) == expected


def test_a_model_in_training_is_refused_and_text_that_is_no_text() -> None:
    with pytest.raises(BadInput, match=r"call model\.eval\(\) first"):
        stream(GPT(TINY), [[1]])
    with pytest.raises(BadInput, match="prompt 1 is not valid UTF-8"):
        stream(model_for(), ["\udcff"], tokenizer=BYTES)


def test_the_package_has_it_at_hand() -> None:
    assert qurve.generate.generate is generate
    assert isinstance(stream(model_of(TINY), [[1]]), Iterator)
