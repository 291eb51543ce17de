"""A nonlinear query beside a pretrained one, against LoRA on Q and V with as many trainable parameters.

Both are trained with transformers' `Trainer` on the same batches of the same text. Each is given the same peak rates on
one seed, and trains at its own best with fresh seeds; chosen on validation, reported on test. The adapter's width is
what comes nearest to LoRA's number of parameters (of SmolLM2-135M at rank 6: width 9, to the parameter).

    python experiments/retrofit.py --model FOLDER --text TEXT.jsonl.zst --out results/retrofit.json

FOLDER is a model of transformers with its tokenizer, TEXT what `qurve prepare` reads (default: the embedded corpus). Of
ten documents one is for validation, one for test. The file is written after every run; a second call with the same file
and plan makes the runs that it lacks. Source of the question: arXiv 2603.13381, section 5.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from qurve import hf
from qurve.data.corpus import embedded_corpus
from qurve.data.sources import Sources
from qurve.errors import BadInput, QurveError
from qurve.files import write_atomic
from qurve.hf.families import find
from qurve.projections import Bottleneck
from qurve.study.paired import paired_interval, paired_p

EVIDENCE = Path(__file__).parents[1] / "results" / "retrofit.json"
FORMAT = 1
SEARCH_SEED = 101
ARMS = {"adapter": "nonlinear query beside W_Q", "lora": "LoRA on Q and V"}


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of token ids, each its own labels."""

    def __init__(self, ids_NT: Tensor) -> None:
        self.ids_NT = ids_NT

    def __len__(self) -> int:
        return len(self.ids_NT)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids_NT[i], "labels": self.ids_NT[i]}


def read(paths: list[str], tokenizer: Any, length: int, wanted: dict[str, int]) -> dict[str, Tensor]:
    """Windows `[N, length]` for each split, by document: 8 of 10 for training, one each for validation and test.

    An end-of-text id stands after every document. Raises `BadInput` where the text is too short.
    """
    found: dict[str, list[int]] = {split: [] for split in wanted}
    for i, text in enumerate(Sources(paths or [embedded_corpus()]).documents()):
        split = {8: "val", 9: "test"}.get(i % 10, "train")
        ids = found[split]
        if len(ids) < wanted[split] * length:
            ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
        elif all(len(own) >= wanted[name] * length for name, own in found.items()):
            break
    for split, count in wanted.items():
        if len(found[split]) < count * length:
            raise BadInput(f"the text gives {len(found[split]):,} {split} tokens; {count * length:,} are needed")
    return {split: torch.tensor(found[split][: n * length]).view(n, length) for split, n in wanted.items()}


def width_like_lora(model: nn.Module, rank: int) -> int:
    """The adapter's width whose parameters come nearest to LoRA's of this rank on the same layers' Q and V."""
    lora = each = 0  # `each`: what one unit of width adds, and what the norms' gains are
    for one in find(model):
        values = model.get_submodule(one.name.removesuffix("q_proj") + "v_proj").out_features
        lora += rank * (2 * one.d_in + one.layout.queries + values)
        each += one.d_in + one.layout.queries
    return max(1, round((lora - each) / each))


def load(folder: str) -> transformers.PreTrainedModel:
    """The pretrained model, in float32. Raises `BadInput` where there is none, or one without `q_proj`."""
    if not (Path(folder) / "config.json").is_file():
        raise BadInput(f"{folder} holds no model of transformers: there is no config.json")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one in find(model):
        if not one.name.endswith(".q_proj"):
            raise BadInput(f"LoRA's Q and V are q_proj and v_proj here, and {one.name} is another")
    return model


def adapted(folder: str, arm: str, plan: dict[str, Any], seed: int) -> tuple[nn.Module, int]:
    """The pretrained model with an arm's new parameters, and their number."""
    model: nn.Module = load(folder)
    if arm == "adapter":
        hf.retrofit(model, Bottleneck(width=width_like_lora(model, plan["rank"])), seed=seed)
    else:
        torch.manual_seed(seed)
        model = get_peft_model(
            model, LoraConfig(r=plan["rank"], lora_alpha=2 * plan["rank"], target_modules=["q_proj", "v_proj"])
        )
    return model, sum(p.numel() for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def loss_of(model: nn.Module, ids_NT: Tensor, batch: int) -> float:
    """Mean loss per token, in nats."""
    model.eval()
    device = next(model.parameters()).device
    losses = [
        (model(input_ids=ids.to(device), labels=ids.to(device)).loss.double().item(), len(ids))
        for ids in ids_NT.split(batch)
    ]
    return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def train(
    folder: str, arm: str, rate: float, seed: int, plan: dict[str, Any], windows: dict[str, Tensor]
) -> dict[str, Any]:
    """One training. The batches are the seed's, whatever the arm."""
    begun = time.perf_counter()
    model, parameters = adapted(folder, arm, plan, seed)
    with tempfile.TemporaryDirectory() as scratch:
        args = transformers.TrainingArguments(
            output_dir=scratch,
            max_steps=plan["steps"],
            per_device_train_batch_size=plan["batch"],
            learning_rate=rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, plan["steps"] // 20),
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=plan["bf16"],
            seed=seed,
            data_seed=seed,
            logging_steps=max(1, plan["steps"] // 10),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=Windows(windows["train"]))
        trainer.train()
    found = {
        "arm": arm,
        "seed": seed,
        "rate": rate,
        "parameters": parameters,
        "train": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "val": loss_of(model, windows["val"], plan["batch"]),
        "test": loss_of(model, windows["test"], plan["batch"]),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print(f"{arm} seed {seed} rate {rate:g}: val {found['val']:.4f}, test {found['test']:.4f}, {found['seconds']} s")
    return found


def best_rate(runs: list[dict[str, Any]], arm: str) -> float:
    """The rate with the lowest validation loss in the search; one that diverged is not chosen."""
    searched = [r for r in runs if r["arm"] == arm and r["seed"] == SEARCH_SEED and r["val"] == r["val"]]
    if not searched:
        raise BadInput(f"{arm} diverged at every rate; give lower ones")
    rate: float = min(searched, key=lambda r: r["val"])["rate"]
    return rate


def wanted(plan: dict[str, Any], runs: list[dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    """The runs that are to be made, in order: the search, then seed by seed through both arms."""
    yield from ((arm, rate, SEARCH_SEED) for rate in plan["rates"] for arm in ARMS)
    yield from ((arm, best_rate(runs, arm), seed) for seed in plan["seeds"] for arm in ARMS)


def summary(tree: dict[str, Any]) -> dict[str, Any]:
    """Each arm at its own rate, and the adapter's test loss minus LoRA's, paired by seed."""
    runs, plan, losses, arms = tree["runs"], tree["plan"], {}, {}
    for arm, label in ARMS.items():
        own = [r for r in runs if r["arm"] == arm and r["seed"] != SEARCH_SEED]
        rate = best_rate(runs, arm)
        losses[arm] = {r["seed"]: r["test"] for r in own}
        arms[arm] = {
            "label": label,
            "parameters": own[0]["parameters"],
            "rate": rate,
            "at_edge": rate in (min(plan["rates"]), max(plan["rates"])),
            "test": sum(losses[arm].values()) / len(own),
            "lower_than_base": tree["base"]["test"] - sum(losses[arm].values()) / len(own),
        }
    differences = [losses["adapter"][seed] - losses["lora"][seed] for seed in plan["seeds"]]
    if len(differences) < 2:
        return {"n": len(differences), "arms": arms, "diff": differences[0]}
    diff, low, high = paired_interval(differences)
    found = {"n": len(differences), "arms": arms, "diff": diff, "diff_low": low, "diff_high": high}
    return found | {"p": paired_p(differences)}


def begin(out: Path, folder: str, plan: dict[str, Any], windows: dict[str, Tensor]) -> dict[str, Any]:
    """What is in the file already, if its plan and its text are these; else a fresh start in a new file."""
    data = {
        split: {"windows": len(ids), "sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}
        for split, ids in windows.items()
    }
    if out.exists():
        tree: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if (tree.get("format"), tree.get("plan"), tree.get("data")) != (FORMAT, plan, data):
            raise BadInput(f"{out} has another plan or other text; name a new file")
        return tree
    model = load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    base = {split: loss_of(model, windows[split], plan["batch"]) for split in ("val", "test")}
    return {
        "format": FORMAT,
        "title": __doc__.splitlines()[0] if __doc__ else "",
        "plan": plan,
        "data": data,
        "model": {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())},
        "machine": {
            "platform": platform.platform(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "base": base,
        "runs": [],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a pretrained model and its tokenizer")
    parser.add_argument("--text", nargs="*", default=[], help="files or folders of text")
    parser.add_argument("--out", type=Path, default=EVIDENCE)
    parser.add_argument("--rank", type=int, default=6, help="LoRA's; the adapter's width follows")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--held-out", type=int, default=64, help="windows of validation and of test, each")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bf16", action="store_true", help="products in bf16 (weights stay in float32)")
    args = parser.parse_args()
    plan = {key: value for key, value in vars(args).items() if key not in ("out", "text")}  # the text by its tokens
    plan["model"] = Path(args.model).resolve().name
    try:
        if SEARCH_SEED in args.seeds:
            raise BadInput(f"seed {SEARCH_SEED} is the search's; a result needs fresh ones")
        load(args.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        counts = {"train": args.steps * args.batch, "val": args.held_out, "test": args.held_out}
        windows = read(args.text, tokenizer, args.length, counts)
        tree = begin(args.out, args.model, plan, windows)
        print(f"the pretrained model: val {tree['base']['val']:.4f}, test {tree['base']['test']:.4f}")
        for arm, rate, seed in wanted(plan, tree["runs"]):
            if not any((r["arm"], r["rate"], r["seed"]) == (arm, rate, seed) for r in tree["runs"]):
                tree["runs"].append(train(args.model, arm, rate, seed, plan, windows))
                write_atomic(args.out, json.dumps(tree, indent=1) + "\n")
        tree["summary"] = summary(tree)
        write_atomic(args.out, json.dumps(tree, indent=1) + "\n")
    except QurveError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for arm, found in tree["summary"]["arms"].items():
        print(f"{arm:8} {found['parameters']:,} parameters, rate {found['rate']:g}: test {found['test']:.4f}")
    found = tree["summary"]
    interval = f" ({found['diff_low']:+.4f} to {found['diff_high']:+.4f})" if "diff_low" in found else ""
    print(f"adapter - lora, n = {found['n']}: {found['diff']:+.4f}{interval}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
