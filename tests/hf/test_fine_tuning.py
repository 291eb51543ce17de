"""A retrofitted model in transformers' `Trainer`: the new parameters learn, the rest stays bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_families import batch, tiny
from torch.testing import assert_close

from qurve import hf
from qurve.hf.part import parts

# PEFT and accelerate call what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::FutureWarning:peft")


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same few ids, of different lengths, padded on the left."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        length = 5 + i % 3
        ids = torch.arange(3, 3 + length) + i % 4
        pad = torch.zeros(7 - length, dtype=torch.long)
        return {
            "input_ids": torch.cat([pad, ids]),
            "attention_mask": torch.cat([pad, torch.ones_like(ids)]),
            "labels": torch.cat([pad - 100, ids]),
        }


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_trainer_with_checkpointing_and_left_padding(name: str, bf16: bool, tmp_path: Path) -> None:
    model = tiny(name)
    hf.retrofit(model)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=8,
        per_device_train_batch_size=8,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        gradient_checkpointing=True,
        bf16=bf16,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=Texts())
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    for n, p in model.named_parameters():
        if n in frozen:
            assert torch.equal(p, frozen[n]), n
        else:
            assert not torch.equal(p, start[n]), n


def test_checkpointing_gives_the_same_gradients() -> None:
    gradients: list[dict[str, Any]] = []
    for checkpointing in (False, True):
        model, inputs = tiny("llama").train(), batch("llama")
        hf.retrofit(model)
        for part in parts(model).values():
            torch.nn.init.ones_(part.post_gain)
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(".nonlinear." in n for n in gradients[0])
    for n, gradient in gradients[0].items():
        assert gradient.any(), n
        assert_close(gradients[1][n], gradient)
