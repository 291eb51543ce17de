"""Are our logits those of nanoGPT and of the paper's authors, given equal weights?

    python benchmarks/logit_parity.py --nanogpt PATH --authors PATH [--fixtures DIR]

Each PATH is a checkout whose own `model.py` is imported. Every case builds their model, saves it as their training
script does, reads that file with `qurve.convert.load_checkpoint` and compares the logits in float32 on the CPU, at the
paper's shape (12 layers, 768 wide). With `--fixtures`, tiny checkpoints are written instead, with their model's logits:
the test data in tests/data/checkpoints. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import platform
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qurve.convert import load_checkpoint

TOLERANCE = 1e-5
"""Of the largest logit, or of one where that is smaller."""

PEER_OF_CASE = {
    "nanogpt": ("nanogpt", {"bias": False}),
    "nanogpt-bias": ("nanogpt", {"bias": True}),
    "nanogpt-compiled": ("nanogpt", {"bias": False}),
    "original": ("authors", {"query_mode": "original"}),
    "original-scale-unstated": ("authors", {"query_mode": "original", "scale": None}),
    "original-mlp-4.75": ("authors", {"query_mode": "original", "mlp": 4.75}),
    "identity": ("authors", {"query_mode": "identity", "tie_weights": False, "halved": True}),
    "residual": ("authors", {"query_mode": "residual", "halved": True}),
    "residual-gelu": ("authors", {"query_mode": "residual_gelu", "halved": True}),
    "residual-gelu-untied": ("authors", {"query_mode": "residual_gelu", "tie_weights": False, "halved": True}),
    "residual-gelu-bias": ("authors", {"query_mode": "residual_gelu", "bias": True, "halved": True}),
}

PAPER = {"n_layer": 12, "heads": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304}
TINY = {"n_layer": 2, "heads": 2, "n_embd": 16, "block_size": 12, "vocab_size": 40}


def import_model(checkout: Path, name: str) -> types.ModuleType:
    """A checkout's `model.py`, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"{name}_model", checkout / "model.py")
    if spec is None or spec.loader is None or not (checkout / "model.py").exists():
        sys.exit(f"{checkout} has no model.py; --{name} wants a checkout of that project")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def model_args(case: str, shape: dict[str, int]) -> dict[str, Any]:
    """The `model_args` as the peer's training script would store them."""
    peer, options = PEER_OF_CASE[case]
    sizes = {key: value for key, value in shape.items() if key != "heads"}
    if peer == "nanogpt":
        return {**sizes, "n_head": shape["heads"], "dropout": 0.0, **options}
    options = dict(options)
    head_width = shape["n_embd"] // shape["heads"]
    stated = {
        **sizes,
        "num_heads": shape["heads"],
        "head_size": head_width,
        "mlp_hidden_size": int(shape["n_embd"] * options.pop("mlp", 4)),
        "scale": head_width**-0.5 * (0.5 if options.pop("halved", False) else 1),
        "learning_rate": 6e-4,
        "save_checkpoint_steps": [50000],
        **options,
    }
    return {key: value for key, value in stated.items() if value is not None}


@torch.no_grad()
def disturb(model: torch.nn.Module, matrix_gain: float) -> None:
    """Move gains off one and biases off zero, so that a forgotten or misplaced one shows; enlarge the matrices."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.mul_(matrix_gain)


def checkpoint(case: str, peers: dict[str, types.ModuleType], shape: dict[str, int], matrix_gain: float) -> Any:
    """The peer's model and the dict that its training script saves."""
    torch.manual_seed(1)
    peer = peers[PEER_OF_CASE[case][0]]
    args = model_args(case, shape)
    with contextlib.redirect_stdout(io.StringIO()):
        model = peer.GPT(peer.GPTConfig(**args)).eval()
    disturb(model, matrix_gain)
    prefix = "_orig_mod." if case.endswith("-compiled") else ""
    state = {prefix + key: value for key, value in model.state_dict().items()}
    return model, {
        "model": state,
        "model_args": args,
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.5),
        "config": {},
    }


@torch.no_grad()
def peer_logits(model: torch.nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """All of them: without targets these models give the last position's alone."""
    logits_BTV: torch.Tensor = model(ids_BT, ids_BT)[0]
    return logits_BTV


def compare(peers: dict[str, types.ModuleType]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in PEER_OF_CASE:
            model, saved = checkpoint(case, peers, PAPER, matrix_gain=1.0)
            file = Path(folder) / "ckpt.pt"
            torch.save(saved, file)
            ids_BT = torch.randint(PAPER["vocab_size"], (1, 256))
            with torch.no_grad():
                theirs, ours = peer_logits(model, ids_BT), load_checkpoint(file)(ids_BT)
            largest = theirs.abs().max().item()
            difference = (ours - theirs).abs().max().item()
            rows.append(
                {
                    "case": case,
                    "parameters": sum(p.numel() for p in model.parameters()),
                    "largest_logit": largest,
                    "largest_difference": difference,
                    "relative": difference / max(1.0, largest),
                    "within": difference <= TOLERANCE * max(1.0, largest),
                }
            )
    return rows


def write_fixtures(peers: dict[str, types.ModuleType], folder: Path) -> list[dict[str, Any]]:
    """`CASE.pt`, and `CASE.safetensors` with `ids [2, T]` and their model's `logits [2, T, V]`."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in PEER_OF_CASE:
        model, saved = checkpoint(case, peers, TINY, matrix_gain=15.0)
        ids_BT = torch.randint(TINY["vocab_size"], (2, TINY["block_size"]))
        torch.save(saved, folder / f"{case}.pt")
        save_file({"ids": ids_BT, "logits": peer_logits(model, ids_BT)}, folder / f"{case}.safetensors")
    return [{"case": case} for case in PEER_OF_CASE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of nanoGPT")
    parser.add_argument("--authors", type=Path, required=True, help="a checkout of the authors' repository")
    parser.add_argument("--fixtures", type=Path, help="write the tiny test checkpoints into this folder instead")
    args = parser.parse_args()
    peers = {name: import_model(getattr(args, name), name) for name in ("nanogpt", "authors")}
    if args.fixtures:
        for row in write_fixtures(peers, args.fixtures):
            print(args.fixtures / f"{row['case']}.pt")
        return
    rows = compare(peers)
    print(f"{'case':25}{'parameters':>12}{'largest logit':>15}{'difference':>12}{'relative':>10}")
    for row in rows:
        figures = f"{row['largest_logit']:15.4f}{row['largest_difference']:12.2e}{row['relative']:10.1e}"
        print(f"{row['case']:25}{row['parameters']:12,}{figures}{'' if row['within'] else '  TOO LARGE'}")
    verdict = {"within": all(row["within"] for row in rows), "tolerance": TOLERANCE, "cases": rows}
    machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "logit_parity", **verdict, **machine}))
    if not verdict["within"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
