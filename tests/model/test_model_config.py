"""`ModelConfig`: what it refuses, what it resolves, its JSON."""

from __future__ import annotations

from typing import Any

import pytest

from qurve.config import from_json, to_json
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.projections import Bottleneck, Identity, Residual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: value}, rf"model\.{name} = {value}: it must be at least 1")
            for name in ("n_layers", "d_model", "n_heads", "d_ff", "context", "vocab_size")
            for value in (0, -3)
        ),
        ({"d_model": 100, "n_heads": 12}, r"d_model = 100 .* 12 heads; the nearest width that does is 96"),
        ({"d_model": 5, "n_heads": 12}, r"the nearest width that does is 12"),
        ({"dropout": 1.0}, r"model\.dropout = 1\.0: it must be at least 0 and below 1"),
        ({"dropout": -0.1}, r"model\.dropout = -0\.1"),
        ({"norm_eps": 0.0}, r"model\.norm_eps = 0\.0: it must be above zero"),
        ({"d_model": 1, "n_heads": 1, "key": Bottleneck()}, r"model\.key: a bottleneck of half of 1 .* give its width"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ModelConfig(**changes)


def test_defaults_are_the_papers_baseline() -> None:
    config = ModelConfig()
    assert (config.n_layers, config.d_model, config.n_heads, config.d_ff) == (12, 768, 12, 3072)
    assert (config.context, config.vocab_size, config.norm_eps) == (1024, 50304, 1e-5)
    assert (config.bias, config.tie_embeddings, config.dropout) == (False, True, 0.0)
    assert (config.head_width, config.scale) == (64, 0.125)
    assert {c.kind for c in (config.query, config.key, config.value)} == {"linear"}


def test_scale_is_resolved() -> None:
    assert ModelConfig(attention_scale=0.0625).scale == 0.0625
    assert ModelConfig(d_model=744).scale == pytest.approx(62**-0.5)


def test_json_round_trip() -> None:
    config = ModelConfig(
        query=Bottleneck(width=5), key=Residual(0.25), value=Identity(), attention_scale=0.1, bias=True, dropout=0.5
    )
    assert from_json(ModelConfig, to_json(config)) == config
    assert from_json(ModelConfig, '{"format": 1}') == ModelConfig()
