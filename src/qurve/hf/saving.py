"""A retrofit in a folder: the reference to the base model, the configuration and the new weights, never the base's own.

`retrofit.json` holds what is needed to do it again, `retrofit.safetensors` the weights, `manifest.json` the sizes and
hashes of both.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qurve.config import from_dict, to_dict
from qurve.errors import BadInput
from qurve.files import check_manifest, write_atomic, write_manifest
from qurve.hf.families import Site, bare, site, within
from qurve.hf.part import NAME, build, parts
from qurve.hf.retrofitting import install, record_of
from qurve.projections.bottleneck import Bottleneck

FORMAT = 1
DESCRIPTION, WEIGHTS = "retrofit.json", "retrofit.safetensors"


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the new weights of a retrofitted model, and what `load` needs besides, into `folder`.

    The base model is referred to by the path or name that it was loaded from, and recognised by its query weights.
    Warns where other parameters can be trained, since they are not saved. Raises `BadInput` for a model that is not
    retrofitted, and for a folder that holds something else.
    """
    record, found = record_of(model), parts(model)
    new = {id(p) for part in found.values() for p in part.parameters()}
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in new]
    if others:
        warnings.warn(
            f"{len(others)} other parameters can be trained and are not saved here, {others[0]} among them; "
            "model.save_pretrained saves them all",
            stacklevel=2,
        )
    target = Path(folder)
    if target.exists() and not (target.is_dir() and all(_is_ours(f) for f in target.iterdir())):
        raise BadInput(f"{target} holds something else; name a new folder")
    config = getattr(model, "config", None)
    description = {
        "format": FORMAT,
        "kind": "retrofit",
        "base": getattr(config, "_name_or_path", None) or None,
        "class": type(model).__name__,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "freeze": record.trainable is not None,
        "config": to_dict(record.config),
        "layers": {bare(name): _signature(model.get_submodule(name)) for name in found},
    }
    tensors = {
        f"{bare(name)}.{own}": p.detach().contiguous()
        for name, part in found.items()
        for own, p in part.named_parameters()
    }
    target.mkdir(parents=True, exist_ok=True)
    for part in target.glob(".*.part"):
        part.unlink()
    whole = target / f".{WEIGHTS}.{os.getpid()}.part"
    save_file(tensors, whole)  # what takes long, or a full disk, leaves an earlier save as it is
    (target / "manifest.json").unlink(missing_ok=True)  # half a save is then told from a whole one
    os.replace(whole, target / WEIGHTS)
    write_atomic(target / DESCRIPTION, json.dumps(description, indent=2) + "\n")
    write_manifest(target)


def _is_ours(file: Path) -> bool:
    """Also what a save that was killed leaves behind."""
    ours = (DESCRIPTION, WEIGHTS, "manifest.json")
    return file.name in ours or (file.suffix == ".part" and file.name.startswith(tuple(f".{name}." for name in ours)))


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """A retrofitted model from what `save` wrote, in evaluation mode.

    Without `model` the base is loaded with transformers from where it was; else `model`, an instance of the base, is
    retrofitted in place. Raises `BadInput`, with `model` unchanged, for a folder that is not whole, missing or
    unexpected weights, a base that is not there, and one whose query weights are others.
    """
    source = Path(folder)
    description = _description(source)
    config = from_dict(Bottleneck, description["config"], f"{source / DESCRIPTION}: config")
    tensors = _tensors(source / WEIGHTS)
    base = _base(description, source) if model is None else model
    if parts(base):
        raise BadInput(f"{type(base).__name__} is retrofitted already; qurve.hf.restore(model) takes it back")
    sites = {name: site(base, within(base, name)) for name in description["layers"]}
    for name, one in sites.items():
        _check_signature(name, description["layers"][name], _signature(one.layer))
    expected = _shapes(sites, config)
    _check(source / WEIGHTS, {name: tuple(t.shape) for name, t in tensors.items()}, expected)
    install(base, config, list(sites.values()), description["freeze"], 0, None)
    for name, one in sites.items():
        for own, parameter in one.layer.get_submodule(NAME).named_parameters():
            parameter.data = tensors[f"{name}.{own}"].to(parameter.device)
    return base.eval()


def _shapes(sites: dict[str, Site], config: Bottleneck) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.{own}": tuple(p.shape)
        for name, one in sites.items()
        for own, p in build(one, config).named_parameters()
    }


def _check(file: Path, there: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    problems = {
        "missing": [name for name in expected if name not in there],
        "unexpected": [name for name in there if name not in expected],
        "of another shape": [name for name in expected if name in there and there[name] != expected[name]],
    }
    told = [f"{what}: {', '.join(names[:4])} ({len(names)} in all)" for what, names in problems.items() if names]
    if told:
        raise BadInput(f"{file}: its weights are not those of its description; {'; '.join(told)}")


def _description(folder: Path) -> dict[str, Any]:
    if not (folder / DESCRIPTION).is_file():
        what = "holds no retrofit" if folder.is_dir() else "is no folder"
        hint = (
            "; it is an adapter of PEFT, which peft.PeftModel.from_pretrained loads"
            if (folder / "adapter_config.json").exists()
            else ""
        )
        raise BadInput(f"{folder} {what}: there is no {DESCRIPTION}{hint}")
    check_manifest(folder, DESCRIPTION, WEIGHTS)
    try:
        tree = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        if (tree["kind"], tree["format"]) != ("retrofit", FORMAT):
            raise BadInput(f"{folder / DESCRIPTION}: format {tree['format']!r} is not {FORMAT}; a newer qurve wrote it")
        layers, freeze = tree["layers"], tree["freeze"]
        fits = isinstance(layers, dict) and layers and isinstance(freeze, bool)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, BadInput):
            raise
        fits = False
    if not fits or "config" not in tree:
        raise BadInput(f"{folder / DESCRIPTION} is no description of a retrofit")
    found: dict[str, Any] = tree
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{file} cannot be read ({error})") from None


def _base(description: dict[str, Any], folder: Path) -> nn.Module:
    """The base model, loaded from where it was, in the dtype and with the attention that it had."""
    reference, name = description.get("base"), description.get("class")
    if not reference:
        raise BadInput(f"{folder} does not say where its base model is: give the instance, load(folder, model)")
    try:
        import transformers
    except ImportError:
        raise BadInput("transformers is not installed: pip install 'qurve[hf]', or give the base model") from None
    kind: Any = getattr(transformers, str(name), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise BadInput(f"transformers has no model {name!r}: give the base as an instance, load(folder, model)")
    try:
        found: nn.Module = kind.from_pretrained(
            reference, dtype=getattr(torch, description["dtype"]), attn_implementation=description["attention"]
        )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        told = " ".join(str(error).split())[:160]
        raise BadInput(
            f"the base model {reference!r} cannot be loaded ({told}); where it has moved, load it and give it: "
            "load(folder, model)"
        ) from None
    return found


# ------------------------------------------------------------------------------------------------------- whose weights


def _signature(layer: nn.Module) -> list[float] | None:
    """Two numbers that know a weight again in any dtype: its norm, and how much of it lies along a fixed direction
    (which for another weight is a draw of about standard normal size). None where it is no plain matrix."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta:
        return None
    values = weight.detach().double().flatten().cpu()
    norm = values.norm().item()
    along = (values @ torch.arange(len(values), dtype=torch.float64).cos()).item()
    return [norm, along / norm if norm else 0.0]


def _check_signature(name: str, stated: Any, found: list[float] | None) -> None:
    if stated is None or found is None:
        return
    if not all(math.isclose(a, b, rel_tol=0.01, abs_tol=0.01) for a, b in zip(stated, found, strict=True)):
        raise BadInput(
            f"this is another base model: the weight of {name} is not the one that the retrofit was made for"
        )
