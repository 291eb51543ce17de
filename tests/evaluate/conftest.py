"""One of our runs, and tiny models of `transformers` with random weights, each with a byte tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from qurve.data.loader import TokenData
from qurve.evaluate import Evaluated, open_model
from qurve.runfolder import RunFolder


@pytest.fixture(scope="session")
def ours(undisturbed: RunFolder, little: TokenData) -> Evaluated:
    return open_model(undisturbed.path, data=little.folder, device="cpu")


@pytest.fixture(scope="session")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a GPT-2 (absolute positions) and of a Llama (rotary ones, and a text begins with `<s>`)."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 264, "bos_token_id": 256, "eos_token_id": 256}
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=24, **sizes)
    llama = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=24,
        **(sizes | {"bos_token_id": 257}),
    )
    folders = {}
    for config, start in ((gpt2, False), (llama, True)):
        torch.manual_seed(1)
        folder = tmp_path_factory.mktemp(config.model_type)
        config.initializer_range = 0.5  # so that the likeliest tokens are no matter of rounding
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        byte_tokenizer(start).save_pretrained(folder)
        folders[config.model_type] = folder
    return folders


def byte_tokenizer(start: bool) -> Any:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(signs)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>", "<s>"])
    if start:
        made.post_processor = processors.TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 257)])
    names = {"bos_token": "<s>"} if start else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", **names)


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    def write(records: Sequence[Any], name: str = "task.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write
