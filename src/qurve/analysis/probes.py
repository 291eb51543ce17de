"""Does the query hold what the linear pathways cannot? Probes for the two roadblocks of arXiv 2603.13381, appendix B.1.

**Conjunctions (roadblock 2).** Concepts are yes-or-no properties `a`, `b` of a token and what comes before it. "a and
b" is no fair target: where both can be read off linearly, so can most of it. What no linear map of `a` and `b` gives is
the rest of the product,

    y = a b - (alpha + beta a + gamma b)        (least squares; for "a xor b" the same, but for a factor)

and it is asked how much of `y` a linear map of `x` gives, and of `Q(x)`, which has as many channels: R^2 on text that
neither was fitted on. Controls: a query of the same layer with its matrices turned at random, for whether any
nonlinearity of that strength would do; labels that are shuffled over the tokens, for what chance gives; and an
untrained model, which is another call.

**Reweighting (roadblock 1).** Along a concept's direction `c` (difference of the means of `x` with and without it), a
linear pathway answers with the same vector `W c` for every token. The query answers with `J(x) c`, `J` its Jacobian:

    J(x) c = g(x) m + rest,    m = E[J c],  g = <J c, m> / |m|^2,  rest orthogonal to m

`spread`, the standard deviation of the gain `g` (whose mean is 1), says how much the concept is turned up or down from
token to token; `turned`, `E|rest|^2 / E|J c|^2`, how much it is written to elsewhere. Both are zero for linear
pathways, keys and values among them. Controls: random directions, and random matrices as above. Whether other concepts
decide about the gain is its R^2 by the labels of all concepts.

Legend: B batch, T tokens, N tokens of several windows, C concepts, P pairs of them, D model width, O width of the
queries, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qurve.analysis.least_squares import Affine, LeastSquares
from qurve.analysis.mechanism import (
    Inputs,
    Window,
    evaluating,
    f_of,
    queries_with_f,
    query_of,
    replacing,
    run,
)
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck
from qurve.projections.module import Projection

RAREST = 0.02
"""Concepts, and products of two, that are rarer than this (or rarer not there) are left out: too few tokens speak."""
LEAST_REST = 0.01
"""Pairs whose `y` has a smaller variance are left out: one concept decides the other."""

TOKENS = 2048
"""Tokens that reweighting is measured on."""

Concepts = Mapping[str, Tensor]
"""Properties of a token by name: true or false for each id of the vocabulary, `[V]`."""

# ------------------------------------------------------------------------------------------------------------- concepts


def text_concepts(pieces: Sequence[bytes]) -> dict[str, Tensor]:
    """What a token's text says, for each id of a vocabulary."""
    texts = [piece.decode("utf-8", errors="replace") for piece in pieces]
    tables = {
        "opens a word": [text[:1].isspace() for text in texts],
        "capital": [any(sign.isupper() for sign in text) for text in texts],
        "mark": [any(not (sign.isalnum() or sign.isspace()) for sign in text) for text in texts],
        "ends on a vowel": [text[-1:].lower() in tuple("aeiouy") for text in texts],
        "several letters": [len(text.strip()) > 2 for text in texts],
    }
    return {name: torch.tensor(table) for name, table in tables.items()}


def random_concepts(n_ids: int, count: int, seed: int) -> dict[str, Tensor]:
    """Halves of the vocabulary at random: concepts without a meaning, for comparison."""
    generator = torch.Generator().manual_seed(seed)
    halves = [torch.randperm(n_ids, generator=generator) < n_ids // 2 for _ in range(count)]
    return {f"random half {n}": half for n, half in enumerate(halves)}


def labels(concepts: Concepts, ids_BT: Tensor) -> dict[str, Tensor]:
    """Each concept of the token and of the one before it, and whether the token came up before: `[B, T]` each.

    The first token has none before it, and its answers are false.
    """
    before_BT = torch.cat([ids_BT[:, :1], ids_BT[:, :-1]], dim=1)
    found = {}
    for name, table_V in concepts.items():
        found[f"now {name}"] = table_V.to(ids_BT.device)[ids_BT]
        found[f"before {name}"] = table_V.to(ids_BT.device)[before_BT]
        found[f"before {name}"][:, 0] = False
    same_BTT = (ids_BT[:, :, None] == ids_BT[:, None, :]).tril(-1)
    return {**found, "came up before": same_BTT.any(-1)}


class _Targets:
    """The rests of products `y` of concepts, their linear parts fitted on some windows."""

    def __init__(self, concepts: Concepts, windows: Sequence[Window]) -> None:
        self.concepts = concepts
        a_NC = torch.cat([self.stacked(window) for window in windows])
        rates_C = a_NC.mean(0)
        kept = ((rates_C > RAREST) & (rates_C < 1 - RAREST)).tolist()
        self.pairs, self.fits = list[tuple[int, int]](), list[Affine]()
        for i, j in itertools.combinations([c for c, keep in enumerate(kept) if keep], 2):
            sums = LeastSquares()
            sums.add(a_NC[:, [i, j]], (a_NC[:, i] * a_NC[:, j])[:, None])
            fit = sums.solve()
            if (a_NC[:, i] * a_NC[:, j] - fit(a_NC[:, [i, j]])[:, 0]).var() >= LEAST_REST:
                self.pairs.append((i, j))
                self.fits.append(fit)
        self.names = list(labels(concepts, windows[0][0]))
        if not self.pairs:
            raise ValueError("no two of the concepts are common enough, and free of each other, for a conjunction")

    def stacked(self, window: Window) -> Tensor:
        """Labels of one window, `[N, C]`."""
        return torch.stack([a_BT.flatten().double() for a_BT in labels(self.concepts, window[0]).values()], dim=-1)

    def of(self, window: Window) -> Tensor:
        """`y`, `[N, P]`."""
        a_NC = self.stacked(window)
        return torch.stack(
            [
                a_NC[:, i] * a_NC[:, j] - fit(a_NC[:, [i, j]])[:, 0]
                for (i, j), fit in zip(self.pairs, self.fits, strict=True)
            ],
            dim=-1,
        )


# --------------------------------------------------------------------------------------------------------- conjunctions


@dataclass(frozen=True)
class Conjunction:
    """How much of one pair's rest `y` can be read off linearly in one block: R^2 on text that was not fitted on."""

    layer: int
    pair: tuple[str, str]
    x: float
    """Of the block's normalised input."""
    q: float
    """Of the query."""
    q_random: tuple[float, ...]
    """Of the query with random matrices, for each seed."""
    q_shuffled: float
    """Of the query, for labels shuffled over each window's tokens."""
    by_window: tuple[float, ...]
    """Parts of `q - x`, one a window; their mean is `q - x`."""


def conjunctions(
    model: GPT,
    concepts: Concepts,
    fit_on: Sequence[Window],
    windows: Sequence[Window],
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Conjunction]:
    """Probe every block that has an `f` for every pair of concepts that is common enough.

    Probes are least squares, fitted on `fit_on`. Raises `ValueError` where no pair is, and for too few tokens.
    """
    targets, names = _Targets(concepts, fit_on), ["x", "q", "shuffled", *(f"random {seed}" for seed in seeds)]
    sums: dict[tuple[int, str], LeastSquares] = defaultdict(LeastSquares)
    for layer, name, z_NO, y_NP in _readings(model, targets, fit_on, seeds):
        sums[layer, name].add(z_NO, y_NP)
    fits = {key: one.solve() for key, one in sums.items()}
    errors: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
    for layer, name, z_NO, y_NP in _readings(model, targets, windows, seeds):
        errors[layer, name].append(torch.stack(fits[layer, name].squared_errors(z_NO, y_NP)))
    found = []
    for layer in queries_with_f(model):
        of_map, of_mean = (torch.stack([torch.stack(errors[layer, name])[:, i] for name in names]) for i in (0, 1))
        r2 = dict(zip(names, 1 - of_map.sum(1) / of_mean.sum(1), strict=True))  # each [P]
        gain_NP = (of_map[0] - of_map[1]) / of_mean[0].mean(0)
        for place, (i, j) in enumerate(targets.pairs):
            scores = {name: of_pair[place].item() for name, of_pair in r2.items()}
            found.append(
                Conjunction(
                    layer,
                    (targets.names[i], targets.names[j]),
                    scores["x"],
                    scores["q"],
                    tuple(scores[f"random {seed}"] for seed in seeds),
                    scores["shuffled"],
                    tuple(gain_NP[:, place].tolist()),
                )
            )
    return found


def _readings(
    model: GPT, targets: _Targets, windows: Sequence[Window], seeds: Sequence[int]
) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    """Window by window and block by block, what is probed `[N, O]` and for what `[N, P]`."""
    queries = queries_with_f(model)
    random = {layer: [randomized(query, seed) for seed in seeds] for layer, query in queries.items()}
    generator = torch.Generator().manual_seed(0)
    for window in windows:
        y_NP = targets.of(window)
        shuffled_NP = y_NP[torch.randperm(len(y_NP), generator=generator)]
        for layer, (inputs, f_BTO) in _fs(model, window).items():
            x_BTD, query = inputs[0], queries[layer]
            q_BTO = query_of(query, x_BTD, f_BTO)
            yield layer, "x", x_BTD.flatten(0, 1), y_NP
            yield layer, "q", q_BTO.flatten(0, 1), y_NP
            yield layer, "shuffled", q_BTO.flatten(0, 1), shuffled_NP
            for seed, other in zip(seeds, random[layer], strict=True):
                with torch.no_grad():
                    yield layer, f"random {seed}", query_of(query, x_BTD, f_of(other, inputs)).flatten(0, 1), y_NP


def _fs(model: GPT, window: Window) -> dict[int, tuple[Inputs, Tensor]]:
    """What each query with an `f` reads on one window, and its `f`."""
    seen: dict[int, tuple[Inputs, Tensor]] = {}

    def see(layer: int, inputs: Inputs, f_BTO: Tensor) -> None:
        seen[layer] = inputs, f_BTO

    with evaluating(model), replacing(model, see):
        run(model, window)
    return seen


def randomized(query: Projection, seed: int) -> Projection:
    """A copy whose `f` has its matrices turned at random, `O W O'` with orthogonal `O`, `O'`: the singular values are
    the trained ones, their directions are not. Anchor, gains and biases stay."""
    other = copy.deepcopy(query)
    generator = torch.Generator().manual_seed(seed)
    of_anchor = {"weight"} if isinstance(query.config, Bottleneck) else set()
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.dim() == 2 and name not in of_anchor:
                left, right = (
                    torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q.to(parameter)
                    for n in parameter.shape
                )
                parameter.copy_(left @ parameter @ right)
    return other


# ---------------------------------------------------------------------------------------------------------- reweighting


@dataclass(frozen=True)
class Reweighting:
    """How the query of one block answers to one concept's direction, on text that nothing was fitted on."""

    layer: int
    concept: str
    spread: float
    """Standard deviation over the tokens of the gain, whose mean is 1."""
    turned: float
    """Share of the answer, squared, that is not along its mean."""
    by_concepts: float
    """R^2 of the gain by the labels of all concepts, a linear map; at most 1, negative where they say nothing."""
    random_matrices: tuple[float, ...]
    """The spread for the same direction and random matrices, for each seed."""
    random_directions: tuple[float, ...]
    """The spread of the trained query for a random direction, for each seed."""


def reweighting(
    model: GPT,
    concepts: Concepts,
    fit_on: Sequence[Window],
    windows: Sequence[Window],
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Reweighting]:
    """Measure every block that has an `f`, for every concept that is common enough, on up to `TOKENS` tokens.

    Directions, mean answers and the map from labels to gains are taken from `fit_on`.
    """
    fitted, judged = _gathered(model, concepts, fit_on), _gathered(model, concepts, windows)
    names = list(labels(concepts, fit_on[0][0]))
    rates_C = fitted.labels_NC.mean(0)
    found = []
    for layer, query in queries_with_f(model).items():
        ours, theirs = fitted.inputs[layer], judged.inputs[layer]
        random = [randomized(query, seed) for seed in seeds]
        drawn = [torch.randn(query.dims.d_in, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        of_directions = tuple(_Answers(query, ours, theirs, c_D.to(ours[0])).spread for c_D in drawn)
        for place, name in enumerate(names):
            if not RAREST < rates_C[place] < 1 - RAREST:
                continue
            has_N = fitted.labels_NC[:, place].bool()
            c_D = ours[0][has_N].mean(0) - ours[0][~has_N].mean(0)
            answers = _Answers(query, ours, theirs, c_D)
            sums = LeastSquares()
            sums.add(fitted.labels_NC, answers.fitted_N[:, None])
            of_map, of_mean = sums.solve().squared_errors(judged.labels_NC, answers.gain_N[:, None])
            of_matrices = tuple(_Answers(other, ours, theirs, c_D).spread for other in random)
            by_concepts = 1 - (of_map / of_mean).item() if of_mean > 0 else 0.0
            found.append(
                Reweighting(layer, name, answers.spread, answers.turned, by_concepts, of_matrices, of_directions)
            )
    return found


@dataclass(frozen=True)
class _Gathered:
    labels_NC: Tensor
    inputs: dict[int, Inputs]
    """What each block's query reads, `[N, D]`."""


def _gathered(model: GPT, concepts: Concepts, windows: Sequence[Window]) -> _Gathered:
    windows = windows[: max(1, TOKENS // windows[0][0].numel())]
    seen: dict[int, list[Inputs]] = {layer: [] for layer in queries_with_f(model)}
    for window in windows:
        for layer, (inputs, _) in _fs(model, window).items():
            seen[layer].append(tuple(t.flatten(0, 1) for t in inputs))
    labels_NC = torch.cat(
        [torch.stack([a.flatten() for a in labels(concepts, window[0]).values()], dim=-1) for window in windows]
    )
    return _Gathered(
        labels_NC.double(), {layer: tuple(map(torch.cat, zip(*rows, strict=True))) for layer, rows in seen.items()}
    )


class _Answers:
    """`J(x) c` of one query: gains on the tokens that its mean is of, and on others."""

    def __init__(self, query: Projection, fitted: Inputs, judged: Inputs, c_D: Tensor) -> None:
        answers_NO = self._of(query, fitted, c_D)
        mean_O = answers_NO.mean(0)
        along_O = mean_O / mean_O.square().sum()
        self.fitted_N = answers_NO @ along_O
        answers_NO = self._of(query, judged, c_D)
        self.gain_N = answers_NO @ along_O
        self.spread = self.gain_N.std().item()
        rest_NO = answers_NO - self.gain_N[:, None] * mean_O
        self.turned = (rest_NO.square().sum() / answers_NO.square().sum()).item()

    @staticmethod
    def _of(query: Projection, inputs: Inputs, c_D: Tensor) -> Tensor:
        x_ND, *other = inputs
        # (torch.func.jvp gives the same, after seconds of loading)
        answers_NO: Tensor = torch.autograd.functional.jvp(  # type: ignore[no-untyped-call]
            lambda x: query.config.forward(query, x, *other), x_ND, c_D.expand_as(x_ND)
        )[1]
        return answers_NO.double()
