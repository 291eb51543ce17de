"""The named configurations: what each one is, the paper's printed figures, and the evidence behind the small ones."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qurve import presets
from qurve.accounting import count
from qurve.config import content_hash, differences, from_json, to_json
from qurve.errors import BadInput
from qurve.projections import Bottleneck, Identity, Linear, Residual
from qurve.train.config import RunConfig

IDENTITY = {"model.query": Identity(), "model.attention_scale": 0.0625}
"""The authors keep the layer's one half in the scale: 1 / (2 * sqrt(64))."""

# What each arm changes in the paper's baseline, and its non-embedding parameters.
ARMS: dict[str, tuple[dict[str, Any], int]] = {
    "baseline": ({}, 84_953_856),
    "baseline-wd005": ({"train.weight_decay": 0.05}, 84_953_856),
    "mlp-4.33": ({"model.d_ff": 3328}, 84_953_856 + 24 * 768 * 256),
    "mlp-4.5": ({"model.d_ff": 3456}, 84_953_856 + 24 * 768 * 384),
    "mlp-4.625": ({"model.d_ff": 3552}, 84_953_856 + 24 * 768 * 480),
    "mlp-4.75": ({"model.d_ff": 3648}, 95_570_688),
    "mlp-4.75-scaled": ({"model.d_ff": 3648, "train.lr": 5.66e-4, "train.min_lr": 5.66e-5}, 95_570_688),
    "mlp-5": ({"model.d_ff": 3840}, 84_953_856 + 24 * 768 * 768),
    "mlp-3.5": ({"model.d_ff": 2688}, 84_953_856 - 24 * 768 * 384),
    "narrow-744": ({"model.d_model": 744, "model.d_ff": 2976}, 12 * 12 * 744**2 + 25 * 744),
    "wide-816": ({"model.d_model": 816, "model.d_ff": 3264}, 12 * 12 * 816**2 + 25 * 816),
    "identity": (IDENTITY, 84_953_856 - 12 * 768**2),
    "identity-untied": (
        IDENTITY
        | {
            "model.tie_embeddings": False,
            "train.weight_decay": 0.03125,
            "train.steps": 600_000,
            "train.horizon": 600_000,
            "train.stop_at": 105_001,
        },
        84_953_856 - 12 * 768**2,
    ),
    "identity-mlp-4.5": (IDENTITY | {"model.d_ff": 3456}, 84_953_856),
    "residual": ({"model.query": Residual()}, 84_953_856),
    "res-gelu-wd005": (
        {"model.query": Bottleneck(), "train.weight_decay": 0.05, "train.lr": 2.4e-3, "train.min_lr": 3e-5},
        84_972_288,
    ),
    "res-gelu-4e-3": ({"model.query": Bottleneck(), "train.lr": 4e-3, "train.min_lr": 1e-5}, 84_972_288),
    "res-gelu-best": ({"model.query": Bottleneck(), "train.lr": 3.6e-3, "train.min_lr": 2e-5}, 84_972_288),
}
every_arm = pytest.mark.parametrize("arm", ARMS)
SMALL = ("baseline", "mlp-4.75", "res-gelu")
NAMES = [name for name in presets.names() if not name.startswith("zoo/")]
"""Those of the zoo have tests of their own."""


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_names() -> None:
    modern = (f"modern/{family}{query}" for family in ("llama", "qwen3", "mixtral") for query in ("", "-res-gelu"))
    named = {
        *(f"paper/{arm}" for arm in ARMS),
        *(f"small/{arm}" for arm in SMALL),
        *modern,
        "modern/qwen3-mlp",
        *(f"scale/{size}/{arm}" for size in ("350m", "760m", "1.3b") for arm in SMALL),
        "smoke",
    }
    assert set(NAMES) == named


def test_modern_blocks_are_those_of_their_families() -> None:
    llama, qwen3, mixtral = (presets.get(f"modern/{name}").model for name in ("llama", "qwen3", "mixtral"))
    for model in (llama, qwen3, mixtral):
        assert (model.norm, model.positions.kind, model.kv_heads, model.bias) == ("rmsnorm", "rope", 2, False)
    assert (llama.mlp.kind, qwen3.mlp.kind, mixtral.mlp.kind) == ("gated", "gated", "moe")
    assert (llama.qk_norm, qwen3.qk_norm, mixtral.qk_norm) == (False, True, False)
    assert qwen3.n_heads * qwen3.head_width != qwen3.d_model
    for name in ("llama", "qwen3", "mixtral"):
        linear, nonlinear = (presets.get(f"modern/{name}{query}") for query in ("", "-res-gelu"))
        assert [key for key in differences(linear, nonlinear) if not key.startswith("model.query.")] == []
    arm, control = (count(presets.get(f"modern/qwen3-{name}").model) for name in ("res-gelu", "mlp"))
    assert control.non_embedding == pytest.approx(arm.non_embedding, rel=1e-3)
    assert differences(presets.get("modern/qwen3-mlp").model, qwen3).keys() == {"d_ff"}


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"there is no preset 'paper/res-gelu-bset'; did you mean 'paper/res-gelu-best'"):
        presets.get("paper/res-gelu-bset")


@pytest.mark.parametrize("name", NAMES)
def test_each_is_itself_alone(name: str) -> None:
    config = presets.get(name)
    assert config == presets.get(name)
    assert from_json(RunConfig, to_json(config)) == config
    twins = [other for other in NAMES if content_hash(presets.get(other)) == content_hash(config)]
    assert twins == [name]
    assert config.sequences >= 1


# ----------------------------------------------------------------------------------------------------- the paper's arms


def test_the_papers_protocol() -> None:
    config = presets.get("paper/baseline")
    model, data, train, evaluation = config.model, config.data, config.train, config.eval
    assert (model.n_layers, model.n_heads, model.d_model, model.d_ff) == (12, 12, 768, 3072)
    assert (model.context, model.vocab_size, model.norm_eps) == (1024, 50_304, 1e-5)
    assert (model.bias, model.dropout, model.tie_embeddings, model.scale) == (False, 0.0, True, 0.125)
    assert (data.corpus, data.tokenizer, data.order, data.order_seed) == ("openwebtext", "gpt2", "paper", 42)
    assert (train.tokens_per_step, train.steps, train.updates, config.sequences) == (491_520, 60_000, 60_000, 480)
    assert (train.schedule, train.warmup_steps, train.last_step) == ("cosine", 2000, 60_002)
    assert (train.lr, train.min_lr, train.weight_decay, train.grad_clip) == (6e-4, 6e-5, 0.1, 1.0)
    assert (train.beta1, train.beta2) == (0.9, 0.95)
    assert (evaluation.every, evaluation.windows, evaluation.splits) == (1000, 2400, ("train", "val"))


@every_arm
def test_each_arm_changes_what_it_says_and_nothing_else(arm: str) -> None:
    changes, non_embedding = ARMS[arm]
    config, baseline = presets.get(f"paper/{arm}"), presets.get("paper/baseline")
    for path, expected in changes.items():
        found = at(config, path)
        assert found == (pytest.approx(expected, rel=1e-3) if isinstance(expected, float) else expected), path
    assert {path.removesuffix(".kind") for path in differences(baseline, config) if not leaf_of_a_query(path)} == {
        *changes
    }
    assert (type(config.model.key), type(config.model.value)) == (Linear, Linear)
    assert count(config.model).non_embedding == non_embedding


def leaf_of_a_query(path: str) -> bool:
    return path.startswith("model.query.") and path != "model.query.kind"


def test_derived_values_are_exact() -> None:
    assert presets.get("paper/identity").model.scale == 1 / (2 * math.sqrt(64))
    assert presets.get("paper/identity-untied").train.weight_decay == 2**-5
    assert presets.get("paper/identity-untied").train.updates == 105_001
    scaled = presets.get("paper/mlp-4.75-scaled").train
    assert scaled.lr == pytest.approx(6e-4 / math.sqrt(1.125), rel=1e-12)
    assert scaled.min_lr == pytest.approx(scaled.lr / 10, rel=1e-12)


def test_the_best_run_sees_29_5_billion_tokens() -> None:
    train = presets.get("paper/res-gelu-best").train
    assert f"{train.updates * train.tokens_per_step / 1e9:.1f}" == "29.5"


# -------------------------------------------------------------------------------------------------- Table 1, as printed

TABLE_1 = {
    "baseline": ("ref.", "0.10", "6e-4", "6e-5", "2.9441", "ref.", "ref."),
    "mlp-4.75": ("+12.5%", "0.10", "6e-4", "6e-5", "2.9165", "+0.94%", "+2.72%"),
    "mlp-4.75-scaled": ("+12.5%", "0.10", "5.66e-4", "5.66e-5", "2.9173", "+0.91%", "+2.65%"),
    "res-gelu-wd005": ("~0.03%", "0.05", "2.4e-3", "3e-5", "2.9015", "+1.45%", "+4.17%"),
    "res-gelu-4e-3": ("~0.03%", "0.10", "4.0e-3", "1e-5", "2.8750", "+2.35%", "+6.68%"),
    "res-gelu-best": ("~0.03%", "0.10", "3.6e-3", "2e-5", "2.8736", "+2.40%", "+6.81%"),
}
COLUMNS = ("delta_params", "weight_decay", "lr", "min_lr", "val_loss", "dll", "dppx")


def test_table_1_is_kept_as_printed() -> None:
    expected = {f"paper/{arm}": dict(zip(COLUMNS, row, strict=True)) for arm, row in TABLE_1.items()}
    assert expected == presets.PRINTED


@pytest.mark.parametrize("arm", TABLE_1)
def test_presets_train_as_the_table_says(arm: str) -> None:
    row, train = presets.PRINTED[f"paper/{arm}"], presets.get(f"paper/{arm}").train
    assert float(row["weight_decay"]) == train.weight_decay
    digits = 2 if "scaled" in arm else 6  # 6e-4 / sqrt(1.125), printed as 5.66e-4
    assert f"{train.lr:.{digits}e}" == f"{float(row['lr']):.{digits}e}"
    assert f"{train.min_lr:.{digits}e}" == f"{float(row['min_lr']):.{digits}e}"


def test_gains_recomputed_from_the_printed_losses() -> None:
    """They agree to the printed digits, but for two: the paper rounded losses with more decimals than it prints."""
    base = float(presets.PRINTED["paper/baseline"]["val_loss"])
    apart = {}
    for arm in [arm for arm in TABLE_1 if arm != "baseline"]:
        row = presets.PRINTED[f"paper/{arm}"]
        loss = float(row["val_loss"])
        for column, gain in (("dll", (base - loss) / base), ("dppx", 1 - math.exp(loss - base))):
            if f"{100 * gain:+.2f}%" != row[column]:
                apart[arm, column] = round(100 * gain, 3)
                assert abs(100 * gain - float(row[column].rstrip("%"))) < 0.011
    assert apart == {("res-gelu-best", "dll"): 2.395, ("mlp-4.75-scaled", "dppx"): 2.644}


# ------------------------------------------------------------------------------------------------- small enough for CPU


def test_small_arms_differ_as_the_papers_do() -> None:
    baseline = presets.get("small/baseline")
    size = baseline.model.d_model
    assert baseline.model.d_ff == 4 * size
    tuned = {"train.lr", "train.min_lr"}
    assert set(differences(baseline, presets.get("small/mlp-4.75"))) - tuned == {"model.d_ff"}
    assert presets.get("small/mlp-4.75").model.d_ff == 4.75 * size
    changed = set(differences(baseline, presets.get("small/res-gelu"))) - tuned
    assert {path for path in changed if not leaf_of_a_query(path)} == {"model.query.kind"}
    assert presets.get("small/res-gelu").model.query == Bottleneck()
    more = count(presets.get("small/mlp-4.75").model).non_embedding / count(baseline.model).non_embedding
    assert more == pytest.approx(1.125, abs=0.001)


@pytest.mark.parametrize("arm", SMALL)
def test_small_rates_are_the_best_of_the_committed_search(arm: str) -> None:
    """Recomputed from every score; a point that did not finish with each seed is out."""
    losses: dict[tuple[float, float], list[float | None]] = {}
    for score in presets.small_search()["scores"]:
        if score["arm"] == arm:
            point = tuple(score["point"].values())
            losses.setdefault(point, []).append(score["val_loss"] if score["status"] == "finished" else None)
    means = {point: sum(found) / len(found) for point, found in losses.items() if None not in found}
    best = min(means, key=means.__getitem__)
    train = presets.get(f"small/{arm}").train
    assert (train.lr, train.min_lr) == best
    assert presets.small_search()["chosen"][arm]["val_loss"] == pytest.approx(means[best])


def test_small_search_was_equal() -> None:
    """Each arm had the same grid, each point the same seeds, and the steps that the presets train."""
    search = presets.small_search()
    tried = {
        arm: sorted((*s["point"].values(), s["seed"]) for s in search["scores"] if s["arm"] == arm) for arm in SMALL
    }
    assert tried["baseline"] == tried["mlp-4.75"] == tried["res-gelu"]
    points = {(lr, floor) for lr, floor, _ in tried["baseline"]}
    assert tried["baseline"] == sorted((*point, seed) for point in points for seed in search["seeds"])
    assert {score["arm"] for score in search["scores"]} == set(search["chosen"]) == set(SMALL)
    assert search["steps"] == presets.get("small/baseline").train.steps
    assert not {1, 2, 3} & set(search["seeds"]), "the seeds of the search are not those of the comparison"


def test_smoke_is_tiny_and_compiles_nothing() -> None:
    config = presets.get("smoke")
    assert count(config.model).total < 200_000
    assert config.model.query == Bottleneck()
    assert (config.train.compile, config.data.tokenizer, config.data.corpus) == (False, "bytes", "embedded")
    assert config.model.vocab_size >= 256
