"""The paper's three architectures in GPT-3's larger shapes, under the paper's protocol, and their toys for rehearsals.

Shapes and the baselines' peak rates are those of table 2.1 of "Language Models are Few-Shot Learners" (arXiv
2005.14165). GPT-3 XL is printed there with 24 heads of 128, which are wider together than its d_model of 2048: here it
has 16 heads of 128.

No rate was searched at these sizes. The baseline's floor is a tenth of its peak, as in the paper; the nonlinear query's
peak and floor have the paper's ratio to the baseline's (3.6e-3 to 6e-4, 2e-5 to 6e-5): where a search may start.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qurve.projections import Bottleneck
from qurve.train.config import DataConfig, EvalConfig, RunConfig


@dataclass(frozen=True)
class Shape:
    """A model's size, and the peak rate that GPT-3's table gives it."""

    n_layers: int
    d_model: int
    n_heads: int
    lr: float


SHAPES = {
    "350m": Shape(24, 1024, 16, 3e-4),
    "760m": Shape(24, 1536, 16, 2.5e-4),
    "1.3b": Shape(24, 2048, 16, 2e-4),
}
ARMS = ("baseline", "mlp-4.75", "res-gelu")
NAMES = tuple(f"{size}/{arm}" for size in SHAPES for arm in ARMS)

PEAK_RATIO = 6.0
"""Of the nonlinear query's peak to the baseline's, in the paper's best run."""
FLOOR_RATIO = 1 / 3
"""Of their floors."""


def run(name: str, paper: RunConfig) -> RunConfig:
    """The configuration `SIZE/ARM`; `paper` is the paper's baseline, whose protocol it has."""
    size, arm = name.split("/")
    shape = SHAPES[size]
    width = shape.d_model
    model = dataclasses.replace(
        paper.model, n_layers=shape.n_layers, d_model=width, n_heads=shape.n_heads, d_ff=4 * width
    )
    lr, floor = shape.lr, shape.lr / 10
    if arm == "mlp-4.75":
        model = dataclasses.replace(model, d_ff=19 * width // 4)
    elif arm == "res-gelu":
        model, lr, floor = dataclasses.replace(model, query=Bottleneck()), PEAK_RATIO * lr, FLOOR_RATIO * floor
    return dataclasses.replace(paper, model=model, train=dataclasses.replace(paper.train, lr=lr, min_lr=floor))


TOY_WIDTH = 64


def toy(config: RunConfig) -> RunConfig:
    """The configuration at a size that a CPU trains in seconds: a rehearsal of everything but the size.

    Kinds, rates, order and ratios (of widths, of the warm-up to the training's length) stay; the text is the embedded
    corpus, as bytes.
    """
    model, train = config.model, config.train
    steps = 40
    small = dataclasses.replace(
        model,
        n_layers=2,
        d_model=TOY_WIDTH,
        n_heads=2,
        d_ff=TOY_WIDTH * model.d_ff // model.d_model,
        context=64,
        vocab_size=320,
    )
    return RunConfig(
        small,
        DataConfig(tokenizer="bytes", order=config.data.order, order_seed=config.data.order_seed),
        dataclasses.replace(
            train,
            steps=steps,
            horizon=None,
            warmup_steps=steps * train.warmup_steps // train.steps,
            tokens_per_step=256,
            checkpoint_every=None,
            compile=False,
            threads=1,
        ),
        EvalConfig(every=steps // 4, windows=8, splits=config.eval.splits),
    )
