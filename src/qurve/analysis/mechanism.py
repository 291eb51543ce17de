"""What does a trained `f` do? Something else is put in its place, and the loss says what that costs.

A query with an `f` is `Q(x) = s (anchor(x) + f(x))` (arXiv 2603.13381, equation 2: `s = 1/2`, the identity as anchor).
An intervention gives another `f` to some blocks, while all else, the anchor among it, computes on:

    zero         0
    mean         the mean of f over other text
    other text   f of another window, token by token: right in its distribution, wrong for these tokens
    linear       x A + b, least squares on other text: the linear query that comes nearest
    swap         two blocks compute each other's f
    rotate       every block computes the next one's f

Losses are taken window by window, so that each intervention is compared with the untouched model on the same windows.
Hooks on the instance do it, and are gone afterwards; no weight is touched.

Legend: B batch, T tokens, D model width, O width of the queries.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from qurve.analysis.least_squares import Affine, LeastSquares
from qurve.model.gpt import GPT
from qurve.projections import Bottleneck, Identity
from qurve.projections import functional as F
from qurve.projections.module import Projection

Window = tuple[Tensor, ...]
"""What `GPT.loss` takes for one window of text: inputs and targets `[1, T]`, and the prefix's length where there is
one."""

Inputs = tuple[Tensor, ...]
"""What a query reads: `x_BTD`, and its second source where it has one."""

Replace = Callable[[int, Inputs, Tensor], Tensor | None]
"""`(block, inputs, f_BTO)` -> what stands in for `f`; None leaves it."""

# ------------------------------------------------------------------------------------------------------------ the parts


def has_f(query: nn.Module) -> bool:
    """Whether a query is `s (anchor + f)`: a bottleneck whose norms belong to `f`, or the identity plus anything."""
    if not isinstance(query, Projection) or isinstance(query.config, Identity):
        return False
    if isinstance(query.config, Bottleneck):
        return query.config.norm_stage == "coupled" and query.config.scale != 0
    return query.config.identity_term != 0


def scale_of(query: Projection) -> float:
    """`s`."""
    return query.config.scale if isinstance(query.config, Bottleneck) else query.config.identity_term


def anchor_of(query: Projection, x_BTD: Tensor) -> Tensor:
    """`anchor(x)`: the identity, the anchor's linear map, or zero."""
    kind = query.config.anchor if isinstance(query.config, Bottleneck) else "identity"
    if kind == "linear":
        return F.linear(x_BTD, query.weight, query.get("bias"))
    return x_BTD if kind == "identity" else x_BTD.new_zeros(*x_BTD.shape[:-1], query.dims.d_out)


def f_of(query: Projection, inputs: Inputs) -> Tensor:
    """`f(x) = Q(x) / s - anchor(x)`, by the query's own weights and no hook of it."""
    return query.config.forward(query, *inputs) / scale_of(query) - anchor_of(query, inputs[0])


def query_of(query: Projection, x_BTD: Tensor, f_BTO: Tensor) -> Tensor:
    """`s (anchor(x) + f)` for any `f`."""
    return scale_of(query) * (anchor_of(query, x_BTD) + f_BTO)


def queries_with_f(model: GPT) -> dict[int, Projection]:
    """The queries that have an `f`, by block. Raises `ValueError` where no block has one."""
    found = {}
    for layer in range(model.config.n_layers):
        query = getattr(model.blocks[0 if model.config.share_blocks else layer].attention, "query", None)
        if isinstance(query, Projection) and has_f(query):
            found[layer] = query
    if not found:
        raise ValueError(
            f"no block's query is an anchor plus an f: model.query = {model.config.query.kind}; give a model with a "
            "nonlinear query ('bottleneck' with norm_stage = coupled, say)"
        )
    return found


# ------------------------------------------------------------------------------------------------------------- the hook


@contextlib.contextmanager
def replacing(model: GPT, replace: Replace) -> Iterator[None]:
    """Within the `with` block, forward passes of this model take `replace`'s tensor in place of each block's `f`.

    With a `replace` that gives None, nothing changes but that it sees every `f`. Call the plain model: a compiled one
    passes hooks by.
    """
    layers: dict[Projection, list[int]] = {}
    for layer, query in queries_with_f(model).items():
        layers.setdefault(query, []).append(layer)
    handles = [
        query.register_forward_hook(partial(_replace, replace, itertools.cycle(at))) for query, at in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace(
    replace: Replace, layers: Iterator[int], query: Projection, inputs: Inputs, q_BTO: Tensor
) -> Tensor | None:
    f_BTO = q_BTO / scale_of(query) - anchor_of(query, inputs[0])
    instead_BTO = replace(next(layers), inputs, f_BTO)
    return None if instead_BTO is None else query_of(query, inputs[0], instead_BTO).to(q_BTO.dtype)


@contextlib.contextmanager
def evaluating(model: GPT) -> Iterator[None]:
    """In evaluation mode and without gradients; afterwards as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def run(model: GPT, window: Window) -> None:
    """One forward pass up to the head, for what hooks see of it."""
    model.hidden(window[0], prefix_B=window[2] if len(window) > 2 else None)


def window_losses(model: GPT, windows: Sequence[Window], replace: Replace | None = None) -> list[float]:
    """Nats per counted token of each window, in evaluation, with `replace` in place of `f` where it is given."""
    with evaluating(model), contextlib.nullcontext() if replace is None else replacing(model, replace):
        return [model.loss(*window).item() for window in windows]


# -------------------------------------------------------------------------------------------------------- interventions


@dataclass(frozen=True)
class Fitted:
    """What interventions take from other text, by block."""

    linear: dict[int, Affine]
    """Least squares of `f` by `x`; its `mean_O` is the mean of `f`."""
    elsewhere: dict[int, Tensor]
    """`f` on the first of the windows, `[1, T, O]`."""


def fit(model: GPT, windows: Sequence[Window]) -> Fitted:
    """Fit on windows that no intervention is judged on. Raises `ValueError` for fewer tokens than `x` has channels."""
    sums = {layer: LeastSquares() for layer in queries_with_f(model)}
    elsewhere: dict[int, Tensor] = {}

    def see(layer: int, inputs: Inputs, f_BTO: Tensor) -> None:
        sums[layer].add(inputs[0], f_BTO)
        elsewhere.setdefault(layer, f_BTO[:1])

    with evaluating(model), replacing(model, see):
        for window in windows:
            run(model, window)
    return Fitted({layer: one.solve() for layer, one in sums.items()}, elsewhere)


def linear_share(model: GPT, fitted: Fitted, windows: Sequence[Window]) -> dict[int, float]:
    """How much of `f` is linear in `x`: R^2 on `windows`, over all channels together, by block.

    1: `f` is a linear map; 0: the fitted one is no better than `f`'s mean; NaN: `f` does not vary. The untouched model
    runs.
    """
    errors = {layer: torch.zeros(2, dtype=torch.float64) for layer in fitted.linear}

    def see(layer: int, inputs: Inputs, f_BTO: Tensor) -> None:
        of_map_O, of_mean_O = fitted.linear[layer].squared_errors(inputs[0], f_BTO)
        errors[layer] += torch.stack([of_map_O.sum(), of_mean_O.sum()]).cpu()

    with evaluating(model), replacing(model, see):
        for window in windows:
            run(model, window)
    return {layer: (1 - of_map / of_mean).item() for layer, (of_map, of_mean) in errors.items()}


@dataclass(frozen=True)
class Intervention:
    name: str
    layers: tuple[int, ...]
    """The blocks that get another `f`."""
    replace: Replace


def interventions(model: GPT, fitted: Fitted) -> list[Intervention]:
    """Those of this module's list: each in every block alone, then in all together.

    Blocks are swapped with the next one, where both queries are of one shape and have weights of their own.
    """
    queries = queries_with_f(model)
    kinds: dict[str, Replace] = {
        "zero": lambda layer, inputs, f_BTO: torch.zeros_like(f_BTO),
        "mean": lambda layer, inputs, f_BTO: fitted.linear[layer].mean_O.to(f_BTO.dtype).expand_as(f_BTO),
        "other text": lambda layer, inputs, f_BTO: fitted.elsewhere[layer][:, : f_BTO.shape[1]].expand_as(f_BTO),
        "linear": lambda layer, inputs, f_BTO: fitted.linear[layer](inputs[0]),
    }
    every = tuple(queries)
    places = [*((layer,) for layer in every), every] if len(every) > 1 else [every]
    found = [Intervention(name, at, _only(at, kind)) for name, kind in kinds.items() for at in places]
    pairs = [(i, j) for i, j in itertools.pairwise(every) if _alike(queries[i], queries[j])]
    found += [Intervention("swap", pair, _by(queries, dict(zip(pair, pair[::-1], strict=True)))) for pair in pairs]
    if len(every) > 2 and len(pairs) == len(every) - 1:
        next_one = dict(zip(every, every[1:] + every[:1], strict=True))
        found.append(Intervention("rotate", every, _by(queries, next_one)))
    return found


def _only(layers: tuple[int, ...], replace: Replace) -> Replace:
    return lambda layer, inputs, f_BTO: replace(layer, inputs, f_BTO) if layer in layers else None


def _by(queries: Mapping[int, Projection], source: Mapping[int, int]) -> Replace:
    """Block `i` computes the `f` of block `source[i]`, of what it reads itself."""
    return lambda layer, inputs, f_BTO: f_of(queries[source[layer]], inputs) if layer in source else None


def _alike(a: Projection, b: Projection) -> bool:
    return a is not b and (a.config, a.dims) == (b.config, b.dims)
