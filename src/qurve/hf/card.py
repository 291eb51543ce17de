"""The model card of an exported run: what it is, how it was trained, how good it is, how to load it."""

from __future__ import annotations

from typing import Any

from qurve.accounting import count
from qurve.data.tokenizers import Tokenizer
from qurve.model.config import ModelConfig
from qurve.runfolder import RunFolder


def card(run: RunFolder, config: ModelConfig, kind: str, tokenizer: Tokenizer | None, n_ids: int) -> str:
    """`README.md`. Numbers are the run's own; no path of the machine that it was trained on is in it."""
    makes_text = config.attends != "bidirectional"
    rows = {
        **_architecture(config),
        **_training(run),
        "tokenizer": f"{tokenizer.spec if tokenizer else 'unknown'}, {n_ids:,} ids",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    is_ours = kind == "QurveForCausalLM"
    encode = 'tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")' if tokenizer else "# (no tokenizer is known)"
    load = "import qurve.hf  # registers the model: pip install 'qurve[hf]'\n" if is_ours else ""
    return f"""\
---
library_name: transformers
pipeline_tag: {"text-generation" if makes_text else "fill-mask"}
tags:
- qurve
---

# {run.path.resolve().name}

{_sentence(config)} Trained with qurve; class `{kind}`.

| | |
|---|---|
{table}

```python
{load}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS FOLDER")
{encode}
```
{_TRUST if is_ours else ""}"""


_TRUST = """
Without that import, `trust_remote_code=True` does: the folder's `modeling_qurve.py` imports it.
"""


def _sentence(config: ModelConfig) -> str:
    query = config.query.kind
    if query == "bottleneck":
        return "A transformer whose queries are nonlinear: an anchor plus a bottleneck MLP (arXiv 2603.13381)."
    return f"A transformer whose query projection is of the kind `{query}`."


def _architecture(config: ModelConfig) -> dict[str, Any]:
    size = count(config)
    return {
        "query": f"`{config.query!r}`",
        "blocks, width, heads, context": f"{config.n_layers}, {config.d_model}, {config.n_heads}, {config.context}",
        "parameters": f"{size.total:,}, of which {size.non_embedding:,} are not embeddings",
    }


def _training(run: RunFolder) -> dict[str, Any]:
    tree, content_hash = run.config_json()
    found: dict[str, Any] = {}
    if lines := run.train_lines():
        train = tree["train"]
        found["trained"] = f"{lines[-1]['step']:,} steps, {lines[-1]['tokens']:,} tokens"
        found["seed, peak rate, weight decay"] = f"{train['seed']}, {train['lr']:g}, {train['weight_decay']:g}"
        found["data"] = f"fingerprint `{str(tree['data']['fingerprint'])[:16]}`"
        found["configuration"] = f"hash `{content_hash[:16]}`"
    for split in ("val", "test"):
        if lines := run.eval_lines(split):
            found[f"loss on {split}"] = f"{lines[-1]['loss']:.4f} nats a token, after step {lines[-1]['step']:,}"
    return found
