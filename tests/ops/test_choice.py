"""Which way a head is run: what `auto` takes, and what is refused."""

from __future__ import annotations

import copy
import pickle
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import qurve.ops.heads
from qurve import GPT, NonlinearQuery
from qurve.data.loader import TokenData
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.ops.heads import FASTEST, choose
from qurve.projections import Bottleneck, Dims, Linear, ProjectionConfig
from qurve.projections.module import Projection, set_impl
from qurve.train.runtime import resolve
from tiny import tiny

D = 12
TRITON_FIRST = {"cpu": ("triton", "reference"), "cuda": ("reference",)}


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def uninterpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("qurve.ops.triton_kernels.INTERPRETED", False)


# ----------------------------------------------------------------------------------------------------------------- auto


def test_auto_takes_what_was_measured() -> None:
    """On the CPU never Triton; inside a compiled model the plain head."""
    assert "triton" not in FASTEST["cpu"]
    for device in ("cpu", "cuda", "mps"):
        assert choose("auto", device, lambda: None, compiling=False) == FASTEST.get(device, ("reference",))[0]
        assert choose("auto", device, lambda: None, compiling=True) == "reference"


def test_auto_passes_over_what_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(qurve.ops.heads, "FASTEST", TRITON_FIRST)
    x = torch.randn(3, D)
    assert NonlinearQuery(D).way(x) == "triton"
    assert NonlinearQuery(D).double().way(x.double()) == "reference"
    assert NonlinearQuery(D).way(x.double()) == "reference"
    assert NonlinearQuery(D, norm_stage="separate").way(x) == "reference"
    with torch.autocast("cpu", torch.float16):
        assert NonlinearQuery(D).way(x) == "reference"
    assert Projection(Linear(), Dims(D, D)).way(x) == "reference"


@pytest.mark.usefixtures("without_triton")
def test_auto_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qurve.ops.heads, "FASTEST", TRITON_FIRST)
    assert NonlinearQuery(D).way(torch.randn(3, D)) == "reference"


def test_inside_a_compiled_model_compiled_is_the_plain_head() -> None:
    assert choose("compiled", "cpu", lambda: None, compiling=True) == "reference"
    assert choose("compiled", "cpu", lambda: None, compiling=False) == "compiled"
    assert choose("triton", "cuda", lambda: None, compiling=True) == "triton"


def test_is_no_part_of_what_a_layer_is() -> None:
    pytest.importorskip("triton")
    layer, plain = NonlinearQuery(D, impl="triton"), NonlinearQuery(D)
    assert layer.config == plain.config
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert [copy.deepcopy(layer).impl, pickle.loads(pickle.dumps(layer)).impl, plain.impl] == [
        "triton",
        "triton",
        "auto",
    ]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_stage": "separate"}, r"impl = 'triton': the kernel knows norm_stage = 'coupled' alone; impl = 'auto'"),
        ({"anchor": "none", "d_out": 1025}, r"the kernel gives at most 1024 outputs, and this projection has 1025"),
        ({"impl": "tritn"}, r"impl = 'tritn' is unknown; did you mean 'triton'\?"),
    ],
)
def test_what_the_kernel_does_not_cover_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        NonlinearQuery(D, **{"impl": "triton", **options})


@pytest.mark.usefixtures("without_triton")
def test_triton_that_is_not_there_is_named() -> None:
    with pytest.raises(BadInput, match=r"impl = 'triton': the package triton is missing .* --no-deps triton"):
        NonlinearQuery(D, impl="triton")


@pytest.mark.usefixtures("uninterpreted")
def test_the_cpu_is_refused() -> None:
    layer = NonlinearQuery(D, impl="triton")  # it may move to a GPU yet
    with pytest.raises(BadInput, match=r"impl = 'triton': it needs a CUDA device, not cpu; impl = 'auto'"):
        layer(torch.randn(3, D))


def test_other_dtypes_are_refused() -> None:
    pytest.importorskip("triton")
    layer = NonlinearQuery(D, impl="triton")
    with pytest.raises(BadInput, match=r"the kernel takes float32 and bfloat16, not torch\.float64"):
        layer(torch.randn(3, D, dtype=torch.float64))
    with torch.autocast("cpu", torch.float16), pytest.raises(BadInput, match=r"not torch\.float16"):
        layer(torch.randn(3, D))


def test_a_kind_without_a_kernel_is_refused() -> None:
    @dataclass(frozen=True)
    class Heavy(Bottleneck):
        kind: ClassVar[str] = "heavy"
        triton_refusal = ProjectionConfig.triton_refusal

    with pytest.raises(BadInput, match="there is no kernel for the kind 'heavy'"):
        set_impl(Projection(Heavy(), Dims(D, D)), "triton")


def test_a_refused_model_is_left_as_it_was() -> None:
    pytest.importorskip("triton")
    config = ModelConfig(n_layers=2, d_model=D, n_heads=2, d_ff=8, context=7, vocab_size=29, query=Bottleneck())
    model = GPT(config)
    model.blocks[1].attention.query = NonlinearQuery(D, norm_stage="separate")
    with pytest.raises(BadInput, match="norm_stage"):
        set_impl(model, "triton")
    with pytest.raises(BadInput, match="'fast' is unknown"):
        set_impl(model, "fast")  # type: ignore[arg-type]
    assert {block.attention.query.impl for block in model.blocks} == {"auto"}
    set_impl(model, "reference")
    assert {block.attention.query.impl for block in model.blocks} == {"reference"}
    assert model.blocks[0].attention.key.impl == "auto"  # nothing to run in another way


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.usefixtures("uninterpreted")
def test_a_training_is_refused_before_it_begins(data: TokenData, monkeypatch: pytest.MonkeyPatch) -> None:
    triton, compiled = "train.head_impl=triton", "train.head_impl=compiled"
    message = "train.head_impl = 'triton': model.query in block 0: it needs a CUDA device, not cpu; train.head_impl"
    with pytest.raises(BadInput, match=message):
        resolve(tiny(triton, "model.query=bottleneck"), data)
    assert resolve(tiny(triton), data).train.head_impl == "triton"  # linear projections have no such head
    monkeypatch.setattr("qurve.train.runtime.compiler", lambda: None)
    with pytest.raises(BadInput, match=r"train.head_impl = 'compiled' needs the C\+\+ compiler"):
        resolve(tiny(compiled, "model.query=bottleneck"), data)
