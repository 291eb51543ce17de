"""The tree of configurations: JSON, hash, settings, differences."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaves import Leaf, another, leaves
from qurve.config import (
    Choice,
    apply_settings,
    content_hash,
    differences,
    from_dict,
    from_json,
    hashed_differences,
    hashed_leaves,
    to_dict,
    to_json,
)
from qurve.errors import BadInput, did_you_mean
from qurve.model.config import LayerOverride, ModelConfig
from qurve.projections import Bottleneck, Identity, Linear, ProjectionConfig, Residual
from qurve.train.config import DataConfig, EvalConfig, RunConfig, TrainConfig

RICH = RunConfig(ModelConfig(query=Bottleneck("linear"), key=Bottleneck("linear", width=5)))
"""A configuration with leaves of every type."""
LEAVES = [leaf for leaf in leaves(RICH) if leaf.path != "model.attends"]  # which goes with the objective
every_leaf = pytest.mark.parametrize("leaf", LEAVES, ids=[leaf.path for leaf in LEAVES])


def with_leaf(config: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    return dataclasses.replace(config, **{name: with_leaf(getattr(config, name), rest, value) if rest else value})


# ----------------------------------------------------------------------------------------------------------------- JSON


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return st.lists(st.text(), max_size=3).map(tuple)
    if members := typing.get_args(hint):
        return st.one_of(*map(values, members))
    floats = st.floats(allow_nan=False, allow_infinity=False)
    return {bool: st.booleans(), int: st.integers(), float: floats, str: st.text(), type(None): st.none()}[hint]


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    """Valid runs: any value for any leaf that accepts it."""
    projection = st.sampled_from(
        [Linear(), Identity(), Residual(0.3), Bottleneck(width=3), Bottleneck("none", eps=1.0)]
    )
    config = RunConfig(ModelConfig(query=draw(projection), key=draw(projection), value=draw(projection)))
    for leaf in draw(st.lists(st.sampled_from(list(leaves(config))), max_size=8)):
        try:
            config = with_leaf(config, leaf.path, draw(values(leaf.hint)))
        except ValueError:
            continue
    return config


@given(run_configs())
def test_json_round_trip(config: RunConfig) -> None:
    read = from_json(RunConfig, to_json(config))
    assert read == config
    assert to_json(read) == to_json(config)
    assert content_hash(read) == content_hash(config)
    assert differences(read, config) == {}


@every_leaf
def test_every_leaf_survives_a_file(leaf: Leaf) -> None:
    changed = with_leaf(RICH, leaf.path, another(leaf.hint, leaf.value))
    read = from_json(RunConfig, to_json(changed))
    assert read == changed
    assert read != RICH
    assert {type(new.value) for new in leaves(read)} == {type(new.value) for new in leaves(changed)}


def test_file_carries_its_format_and_kinds() -> None:
    tree = json.loads(to_json(RICH))
    assert tree["format"] == 1
    assert tree["model"]["query"] == {"kind": "bottleneck", **dataclasses.asdict(Bottleneck("linear"))}
    assert tree["eval"]["splits"] == ["val"]


def test_missing_fields_take_their_defaults() -> None:
    assert from_json(RunConfig, '{"format": 1, "train": {"steps": 7}}') == RunConfig(train=TrainConfig(steps=7))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"c\.json: not JSON"),
        ("", r"c\.json: not JSON"),
        ("[1]", r"c\.json: must hold a JSON object"),
        ("{}", r"c\.json: not a qurve configuration of format 1"),
        ('{"format": 2}', r"c\.json: not a qurve configuration of format 1"),
        ('{"format": 1, "trian": {}}', r"c\.json: unknown field 'trian'; did you mean 'train'"),
        ('{"format": 1, "train": {"step": 1}}', r"unknown field 'train\.step'; did you mean 'steps'"),
        ('{"format": 1, "train": 3}', r"train must be an object, not 3"),
        ('{"format": 1, "train": {"steps": 1.5}}', r"train\.steps = 1\.5 is not a whole number"),
        ('{"format": 1, "train": {"steps": true}}', r"train\.steps = True is not a whole number"),
        ('{"format": 1, "train": {"steps": "8"}}', r"train\.steps = '8' is not a whole number"),
        ('{"format": 1, "train": {"lr": NaN}}', r"train\.lr = nan is not a finite number"),
        ('{"format": 1, "train": {"lr": 1e999}}', r"train\.lr = inf is not a finite number"),
        ('{"format": 1, "train": {"lr": true}}', r"train\.lr = True is not a finite number"),
        ('{"format": 1, "train": {"device": 1}}', r"train\.device = 1 is not a text"),
        ('{"format": 1, "train": {"compile": 1}}', r"train\.compile = 1 is not true or false"),
        ('{"format": 1, "train": {"stop_at": "x"}}', r"train\.stop_at = 'x' is not whole number or none"),
        ('{"format": 1, "train": {"schedule": "cosin"}}', r"train\.schedule = 'cosin' .*; did you mean 'cosine'"),
        ('{"format": 1, "train": {"steps": 0}}', r"c\.json: train\.steps = 0: it must be at least 1"),
        ('{"format": 1, "eval": {"splits": "val"}}', r"eval\.splits = 'val' is not a list such as"),
        ('{"format": 1, "eval": {"splits": ["val", 3]}}', r"eval\.splits\[1\] = 3 is not a text"),
        ('{"format": 1, "model": {"query": {}}}', r"model\.query\.kind = None is unknown; there are: .*linear"),
        ('{"format": 1, "model": {"query": {"kind": []}}}', r"model\.query\.kind = \[\] is unknown"),
        ('{"format": 1, "model": {"query": {"kind": "lineal"}}}', r"'lineal' is unknown; did you mean 'linear'"),
        ('{"format": 1, "model": {"query": {"kind": "linear", "width": 3}}}', r"'model\.query\.width'; there are none"),
        ('{"format": 1, "model": {"query": {"kind": "bottleneck", "width": 0}}}', r"model\.query: width = 0"),
    ],
)
def test_bad_files_are_named(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_json(RunConfig, text, "c.json")


def test_whole_floats_are_ints_and_ints_are_floats() -> None:
    read = from_dict(TrainConfig, {"steps": 8.0, "lr": 1})
    assert (read.steps, type(read.steps), read.lr, type(read.lr)) == (8, int, 1.0, float)


def test_each_family_has_its_own_registry() -> None:
    class Animal(Choice):
        pass

    assert Animal.registry == {}
    assert ProjectionConfig.registry is Bottleneck.registry


# ----------------------------------------------------------------------------------------------------------------- hash

NOT_HASHED = {
    "data.path",
    "data.corpus",
    "data.tokenizer",
    "train.stop_at",
    "train.checkpoint_every",
    "train.keep",
    "train.keep_every",
    "train.loss_bound",
    "train.loss_bound_steps",
    "train.parallel",
    "train.activation_checkpointing",
    "train.trackers",
    "train.dynamics_every",
    "train.log_every",
    "eval.attention_logits",
}
"""Where and how a run is stored, logged, checkpointed or stopped. (The data itself counts by its fingerprint.)"""


def test_what_the_hash_leaves_out() -> None:
    assert {leaf.path for leaf in LEAVES if not leaf.hashed} == NOT_HASHED


@every_leaf
def test_hash_sees_what_changes_the_numbers_and_nothing_else(leaf: Leaf) -> None:
    changed = with_leaf(RICH, leaf.path, another(leaf.hint, leaf.value))
    assert changed != RICH
    assert (content_hash(changed) == content_hash(RICH)) == (leaf.path in NOT_HASHED)


def test_hash_sees_kinds_and_fields_apart() -> None:
    models = [ModelConfig(**{place: kind}) for place in ("query", "key") for kind in (Identity(), Residual())]
    assert len({content_hash(model) for model in [ModelConfig(), *models]}) == 5
    assert content_hash(TrainConfig(lr=1.0, min_lr=0.5)) != content_hash(TrainConfig(lr=1.0, min_lr=0.25))


def test_hash_takes_an_int_for_the_float_it_is() -> None:
    assert content_hash(TrainConfig(grad_clip=1)) == content_hash(TrainConfig(grad_clip=1.0))


def test_hash_is_one_in_every_process() -> None:
    program = "from qurve.config import *; from qurve.train.config import *; print(content_hash(RunConfig()))"
    expected = content_hash(RunConfig())
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        out = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert out.stdout.strip() == expected, out.stderr
    assert len(expected) == 64


# ------------------------------------------------------------------------------------------------------------- settings


def words(value: Any) -> str:
    return json.dumps(to_dict(value)) if isinstance(value, tuple) else str(value)


@every_leaf
def test_every_leaf_can_be_set(leaf: Leaf) -> None:
    value = another(leaf.hint, leaf.value)
    expected = with_leaf(RICH, leaf.path, value)
    assert apply_settings(RICH, [f"{leaf.path}={words(value)}"]) == expected
    assert apply_settings(RICH, [f"  {leaf.path} = {words(value)} "]) == expected
    assert apply_settings(expected, [f"{leaf.path}={words(leaf.value)}"]) == RICH


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("train.lr=1E-3", "train.lr", 1e-3),
        ("train.lr=.5", "train.lr", 0.5),
        ("train.lr=1", "train.lr", 1.0),
        ("train.steps=1e3", "train.steps", 1000),
        ("train.steps=8.0", "train.steps", 8),
        ("train.compile=True", "train.compile", True),
        ("train.compile=false", "train.compile", False),
        ("train.stop_at=none", "train.stop_at", None),
        ("train.stop_at=None", "train.stop_at", None),
        ("train.stop_at=null", "train.stop_at", None),
        ("train.stop_at=12", "train.stop_at", 12),
        ("data.path=none", "data.path", None),
        ("data.path=a=b", "data.path", "a=b"),
        ("data.path=12", "data.path", "12"),
        ("data.path=", "data.path", ""),
        ("data.tokenizer=none", "data.tokenizer", "none"),
        ('eval.splits=["train", "val"]', "eval.splits", ("train", "val")),
        ("model.query=identity", "model.query", Identity()),
        ('model.query={"kind": "residual", "scale": 1}', "model.query", Residual(1.0)),
        ("model.query.width=8", "model.query.width", 8),
        ("model.query.width=none", "model.query.width", None),
        ("model.query.pre_norm=none", "model.query.pre_norm", "none"),
        ("model.query.activation=identity", "model.query.activation", "identity"),
        (
            'model.overrides=[{"layers": [0], "query": {"kind": "residual"}}, {"layers": [1, 2], "window": 4}]',
            "model.overrides",
            (LayerOverride((0,), query=Residual()), LayerOverride((1, 2), window=4)),
        ),
    ],
)
def test_values_are_read(setting: str, path: str, value: Any) -> None:
    config = apply_settings(RICH, [setting])
    assert config == with_leaf(RICH, path, value)
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    assert type(found) is type(value)


def test_settings_apply_in_order() -> None:
    config = apply_settings(
        RunConfig(), ["model.query=bottleneck", "model.query.width=9", "train.steps=1", "train.steps=2"]
    )
    assert (config.model.query, config.train.steps) == (Bottleneck(width=9), 2)
    assert apply_settings(config, ["model.query=bottleneck"]).model.query == Bottleneck()
    assert apply_settings(config, []) is config


def test_settings_have_to_fit_together_only_when_all_are_made() -> None:
    fitting = ["model.d_model=18", "model.n_heads=3", "model.query=bottleneck", "model.query.width=5"]
    for settings in (fitting, [fitting[1], fitting[0], *fitting[2:]]):
        model = apply_settings(RunConfig(), settings).model
        assert (model.d_model, model.n_heads, model.query) == (18, 3, Bottleneck(width=5))
    with pytest.raises(BadInput, match=r"^model\.d_model = 19 does not divide into model\.n_heads = 3"):
        apply_settings(RunConfig(), ["model.d_model=19", "model.n_heads=3", "train.steps=1"])
    with pytest.raises(BadInput, match=r"^--set model\.query\.width=0: width = 0"):
        apply_settings(RICH, ["train.steps=1", "model.query.width=0", "train.steps=2"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=8x", r"train\.steps = '8x' is not a whole number"),
        ("train.lr=1e-3x", r"train\.lr = '1e-3x' is not a finite number"),
        ("train.lr=nan", r"train\.lr = nan is not a finite number"),
        ("train.lr=NaN", r"train\.lr = nan"),
        ("train.lr=-inf", r"train\.lr = -inf"),
        ("train.lr=Infinity", r"train\.lr = inf"),
        ("train.lr=1e999", r"train\.lr = inf"),
        (f"train.lr={'9' * 400}", r"is not a finite number"),
        (f"train.lr={'9' * 5000}", r"is not a finite number"),
        ("train.steps=inf", r"train\.steps = inf is not a whole number"),
        ("train.steps=nan", r"train\.steps = nan is not a whole number"),
        ("train.steps=1.5", r"train\.steps = 1\.5 is not a whole number"),
        ("train.steps=true", r"train\.steps = True is not a whole number"),
        ("train.steps=", r"train\.steps = '' is not a whole number"),
        ("train.steps=none", r"train\.steps = 'none' is not a whole number"),
        ("train.compile=1", r"train\.compile = 1 is not true or false"),
        ("train.compile=yes", r"train\.compile = 'yes' is not true or false"),
        ("train.stop_at=0", r"train\.stop_at = 0: it must be at least 1"),
        ("train.precision=bf17", r"train\.precision = 'bf17' .*; did you mean 'bf16'"),
        ("train.precision=true", r"train\.precision = True is not one of its values"),
        ("train.step=8", r"--set train\.step: there is no field 'step'; did you mean 'steps'"),
        ("trian.steps=8", r"--set trian\.steps: there is no field 'trian'; did you mean 'train'"),
        ("train.steps.x=8", r"'steps' is a value \(60000\) and has no field 'x'"),
        ("model.query.widht=8", r"no field 'widht'; did you mean 'width'"),
        ("model.value.width=8", r"no field 'width'; there are none"),
        ("model.query=bottelneck", r"model\.query\.kind = 'bottelneck' is unknown; did you mean 'bottleneck'"),
        ("model.query={", r"model\.query"),
        ('model.query={"kind": "bottleneck", "width": 0}', r"model\.query: width = 0"),
        ("model.query.width=0", r"--set model\.query\.width=0: width = 0"),
        ("model.query.eps=-1", r"--set model\.query\.eps=-1: eps = -1"),
        ("model.d_model=100", r"does not divide into model\.n_heads"),
        ("model=5", r"model must be an object, not 5"),
        ("eval.splits=val", r'eval\.splits = .val. is not a list such as \["a", "b"\]'),
        ('model.overrides=[{"query": {"kind": "linear"}}]', r"model\.overrides\[0\]\.layers is missing"),
        ('model.overrides=[{"layers": [0]}]', r"the one for the layers \[0\] changes nothing"),
        ('model.overrides=[{"layers": [12], "window": 3}]', r"there is no layer 12; they are 0 to 11"),
        ('model.overrides=[{"layers": 0, "window": 3}]', r"overrides\[0\]\.layers = 0 is not a list such as \[0, 1\]"),
        ('model.overrides=[{"layers": [0], "qeury": null}]', r"'model\.overrides\[0\]\.qeury'; did you mean 'query'"),
        (
            'model.overrides=[{"layers": [0], "query": {"kind": "lineal"}}]',
            r"overrides\[0\]\.query\.kind = 'lineal' .*'linear'",
        ),
        (
            'model.overrides=[{"layers": [0], "query": "linear"}]',
            r'query = .linear. is not object such as {"kind": …} or',
        ),
        ("model.overrides=linear", r"model\.overrides = 'linear' is not a list such as \[{…}\]"),
        ("train.steps", r"write it as path=value"),
        ("=8", r"write it as path=value"),
        ("train..steps=8", r"there is no field ''"),
    ],
)
def test_bad_settings_are_named(setting: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        apply_settings(RICH, [setting])


# ---------------------------------------------------------------------------------------------------------- differences


def test_differences_name_the_leaves() -> None:
    changed = apply_settings(RICH, ["train.lr=0.001", "model.query=identity", 'eval.splits=["train"]'])
    found = differences(RICH, changed)
    assert found.pop("train.lr") == (6e-4, 1e-3)
    assert found.pop("model.query.kind") == ("bottleneck", "identity")
    assert found.pop("eval.splits") == (["val"], ["train"])
    assert {path: right for path, (_, right) in found.items()} == {
        f"model.query.{field.name}": None for field in dataclasses.fields(Bottleneck)
    }
    assert differences(changed, RICH)["train.lr"] == (1e-3, 6e-4)


@every_leaf
def test_hashed_differences_see_what_the_hash_sees(leaf: Leaf) -> None:
    changed = with_leaf(RICH, leaf.path, another(leaf.hint, leaf.value))
    assert list(hashed_differences(RICH, changed)) == ([] if leaf.path in NOT_HASHED else [leaf.path])
    assert (leaf.path in hashed_leaves(RICH)) == (leaf.path not in NOT_HASHED)


@every_leaf
def test_differences_see_every_leaf(leaf: Leaf) -> None:
    value = another(leaf.hint, leaf.value)
    assert differences(RICH, with_leaf(RICH, leaf.path, value)) == {leaf.path: (to_dict(leaf.value), to_dict(value))}


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda n=name: TrainConfig(**{n: 0}), rf"train\.{name} = 0: .* at least 1") for name in
          ("steps", "tokens_per_step", "log_every", "stop_at", "micro_batch", "horizon", "decay_steps", "threads",
           "checkpoint_every")),
        *((lambda n=name: TrainConfig(**{n: -1}), rf"train\.{name} = -1: .* at least 0") for name in
          ("warmup_steps", "lr", "weight_decay", "grad_clip", "min_lr")),
        (lambda: TrainConfig(beta1=1.0), r"train\.beta1 = 1\.0"),
        (lambda: TrainConfig(beta2=-0.1), r"train\.beta2 = -0\.1"),
        (lambda: TrainConfig(device="gpu"), r"train\.device = 'gpu' is not auto, cpu, cuda or cuda:N"),
        (lambda: TrainConfig(device="cuda:x"), r"train\.device = 'cuda:x'"),
        (lambda: EvalConfig(every=0), r"eval\.every = 0: .* at least 1"),
        (lambda: EvalConfig(windows=0), r"eval\.windows = 0: .* at least 1"),
        (lambda: RunConfig(train=TrainConfig(tokens_per_step=1000)).sequences, r"the nearest number that does is 1024"),
        (lambda: RunConfig(train=TrainConfig(tokens_per_step=3)).sequences, r"the nearest number that does is 1024"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_what_is_derived() -> None:
    train = TrainConfig(steps=10)
    assert (train.last_step, train.updates) == (10, 10)
    assert dataclasses.replace(train, horizon=12).last_step == 12
    assert dataclasses.replace(train, stop_at=4).updates == 4
    assert dataclasses.replace(train, stop_at=40).updates == 10
    assert RunConfig().sequences == 480
    assert TrainConfig(device="cuda:1").device == "cuda:1"
    assert DataConfig().order == "epochs"


def test_nearest_name() -> None:
    assert did_you_mean("stpes", ["lr", "steps"]) == "; did you mean 'steps'?"
    assert did_you_mean("zzz", ["lr", "steps"]) == "; there are: lr, steps"


def test_what_is_nested_without_end_is_refused() -> None:
    with pytest.raises(BadInput, match="nested too deeply"):
        apply_settings(RunConfig(), ["model.overrides=" + "[" * 100_000])
    with pytest.raises(BadInput, match="not JSON"):
        from_json(RunConfig, '{"format": 1, "model": ' + "[" * 100_000)
