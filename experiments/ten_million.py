"""Best against best at ten million parameters: planned, and not run.

`experiments/fair_search.py` with 6 blocks of 384 and 20 tokens for each parameter. That is more text than the embedded
corpus has: it takes `--data`. `REPRODUCE.md` says how long two cores would need.

    qurve study plan experiments/ten_million.py
    qurve compare experiments/ten_million.py --data data/text --out runs/ten-million --pool runs/pool
"""

from __future__ import annotations

import dataclasses

from fair_search import SEEDS, arms

from qurve import accounting, presets
from qurve.study.definition import Study
from qurve.study.search import Search
from qurve.train.config import RunConfig

TOKENS_PER_PARAMETER = 20
SPACE = {"train.lr": (5e-4, 1e-3, 2e-3), "train.min_lr/train.lr": (0.01, 0.1, 1.0)}


def baseline() -> RunConfig:
    config = presets.small("baseline", 1e-3, 1e-4)
    model = dataclasses.replace(config.model, n_layers=6, d_model=384, n_heads=6, d_ff=1536, context=256)
    tokens = TOKENS_PER_PARAMETER * accounting.count(model).non_embedding
    train = dataclasses.replace(config.train, tokens_per_step=16_384, warmup_steps=200, compile=True)
    train = dataclasses.replace(train, steps=round(tokens / train.tokens_per_step))
    evaluation = dataclasses.replace(config.eval, every=1000, splits=("val", "test"), attention_logits=True)
    return dataclasses.replace(config, model=model, train=train, eval=evaluation)


STUDY = Study(
    "ten-million", "Best against best, at ten million parameters", arms(baseline()), SEEDS, search=Search(SPACE)
)
