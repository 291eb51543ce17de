"""The nonlinear query as a method of PEFT, so that printing, enabling, several adapters and files are PEFT's own.

    from qurve.hf import NonlinearQueryConfig        registers the method

    model = peft.get_peft_model(model, NonlinearQueryConfig(width=16, task_type="CAUSAL_LM"))
    model.save_pretrained(folder)                    and PeftModel.from_pretrained(base, folder)

Importing this file registers it: PEFT knows its methods by an enumeration, to which its registration asks that an entry
be added. It cannot be merged, and PEFT is told so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qurve.errors import BadInput
from qurve.hf.families import Site, bare, find, site
from qurve.hf.part import QueryPart, build
from qurve.hf.retrofitting import NO_MERGE
from qurve.projections.bottleneck import Bottleneck
from qurve.projections.functional import Activation, Norm

try:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils import PeftType, register_peft_method
except ImportError:
    raise BadInput("peft is not installed: pip install 'qurve[hf]'") from None

METHOD = "nonlinear_query"


@dataclass
class NonlinearQueryConfig(PeftConfig):
    """`scale * f(x)` beside the query weights; the fields are those of `qurve.projections.Bottleneck`.

    Raises `BadInput` for values that cannot be.
    """

    target_modules: list[str] | str | None = None
    """Query layers, in PEFT's ways of naming them. None: all of a model that `qurve.hf.FAMILIES` knows."""
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    width: int | None = None
    activation: Activation = "gelu"
    pre_norm: Norm = "rmsnorm"
    post_norm: Norm = "layernorm"
    eps: float = 1e-5
    scale: float = 0.5
    exact_start: bool = True
    peft_type: Any = field(default=None, init=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = PeftType(METHOD.upper())
        self.bottleneck()

    def bottleneck(self) -> Bottleneck:
        """The same as a projection's configuration."""
        return Bottleneck(
            "linear",
            self.width,
            self.activation,
            self.pre_norm,
            self.post_norm,
            self.eps,
            self.scale,
            start="exact" if self.exact_start else "usual",
        )


class NonlinearQueryLayer(nn.Module, BaseTunerLayer):
    """A query layer with the nonlinear parts of its adapters; the active ones act, one after the other."""

    adapter_layer_names = ("nonlinear_query_parts",)

    def __init__(self, at: Site) -> None:
        super().__init__()
        self.base_layer, self.name, self.layout = at.layer, at.name, at.layout
        self.in_features = at.d_in
        self.out_features = at.layout.groups * at.layout.size
        self.nonlinear_query_parts = nn.ModuleDict()

    def update_layer(self, adapter_name: str, config: NonlinearQueryConfig) -> None:
        """Add an adapter, or draw it anew."""
        at = Site(self.name, self.get_base_layer(), self.in_features, self.layout)
        part = build(at, config.bottleneck())
        part.draw(torch.initial_seed(), at.name)
        self.nonlinear_query_parts[adapter_name] = part
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.base_layer(x, *args, **kwargs)
        for name in () if self.disable_adapters else self.active_adapters:
            if name in self.nonlinear_query_parts:
                part = self.nonlinear_query_parts[name]
                assert isinstance(part, QueryPart)
                y = part.onto(x, y)
        return y

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise BadInput(NO_MERGE)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return False


class NonlinearQueryModel(BaseTuner):
    """The tuner behind `NonlinearQueryConfig`."""

    prefix = METHOD + "_"
    tuner_layer_cls = NonlinearQueryLayer
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  PEFT's own attribute

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: Any) -> PeftConfig:
        assert isinstance(peft_config, NonlinearQueryConfig)
        if peft_config.target_modules is None:
            peft_config.target_modules = sorted(bare(one.name) for one in find(self.model))
        return peft_config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        assert isinstance(peft_config, NonlinearQueryConfig)
        if isinstance(target, NonlinearQueryLayer):
            target.update_layer(adapter_name, peft_config)
            return
        layer = NonlinearQueryLayer(site(self.model, current_key))
        layer._active_adapter = adapter_name
        layer.update_layer(adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _check_merge_allowed(self) -> None:
        raise BadInput(NO_MERGE)


def _add_to_enumeration(name: str) -> None:
    """An entry more in PEFT's enumeration of its methods."""
    if name in PeftType.__members__:
        return
    entry = str.__new__(PeftType, name)
    entry._name_ = entry._value_ = name
    setattr(PeftType, name, entry)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = PeftType._value2member_map_[name] = entry


def _register() -> None:
    _add_to_enumeration(METHOD.upper())
    register_peft_method(name=METHOD, config_cls=NonlinearQueryConfig, model_cls=NonlinearQueryModel)


_register()
