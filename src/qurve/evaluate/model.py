"""A trained model as evaluation sees it: texts to ids, ids to logits, whether it lies in a run's folder or in one of
Hugging Face's `transformers`.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qurve.errors import BadInput
from qurve.generate.loop import generate
from qurve.generate.text import run_tokenizer
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.runtime import resolve_device, resolve_precision

if TYPE_CHECKING:
    from qurve.train.config import Precision


class Evaluated(ABC):
    """A causal language model with its tokenizer.

    `name`: its folder. `context`: the most tokens it reads. `n_ids`: ids 0 … n_ids - 1 are tokens, later rows of the
    vocabulary are padding. `end`: the id that ends a document. `start`: the id that its tokenizer puts before every
    text, if it does.
    """

    name: str
    context: int
    n_ids: int
    end: int
    start: int | None = None

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special ones."""

    @abstractmethod
    def logits(self, ids_BT: Tensor, lengths_B: Tensor, first: int) -> Tensor:
        """Logits `[B, T - first, V]` after the tokens from `first` on. `lengths_B`: where each sequence's padding, at
        its right, begins; what is computed there means nothing."""

    @abstractmethod
    def continued(self, ids: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> str:
        """The likeliest continuation, token by token, up to the first stop text, the end of the document, or so many
        tokens."""

    @property
    def first(self) -> int:
        """The id that stands before a text which nothing else stands before."""
        return self.end if self.start is None else self.start


def open_model(
    folder: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    device: str = "auto",
    precision: Precision = "float32",
) -> Evaluated:
    """The model in a run's folder (its newest checkpoint), or in a folder that `transformers` wrote.

    data       where the run's data is now, if elsewhere: its tokenizer is needed
    precision  of the matrix products

    Raises `BadInput` for a folder that holds neither, for one that is not whole, and for a model that is not causal.
    """
    place = Path(folder)
    device = resolve_device(device)
    dtype = {"float32": torch.float32, "bf16": torch.bfloat16}[resolve_precision(precision, device.partition(":")[0])]
    return _OurRun(place, data, device, dtype) if is_run(place) else _HuggingFace(place, device, dtype)


def is_run(place: Path) -> bool:
    """Whether a folder is a run's; else it is one of `transformers`. Raises `BadInput` for a folder that is neither."""
    if not place.is_dir():
        raise BadInput(
            f"{place} {'is a file' if place.exists() else 'does not exist'}; give a run's folder, or a model's"
        )
    if RunFolder(place).metrics_file.exists():
        return True
    if model_type(place) is not None:
        return False
    raise BadInput(
        f"{place} holds no model: it is neither a run's folder (metrics.jsonl) nor a Hugging Face model's (config.json "
        "with a model_type)"
    )


def model_type(folder: str | os.PathLike[str]) -> str | None:
    """The kind of model that a folder of `transformers` says it holds, in its config.json; None for any other folder.

    Raises `BadInput` for a config.json that cannot be read.
    """
    file = Path(folder) / "config.json"
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, OSError, RecursionError) as error:
        raise BadInput(f"{file} cannot be read ({error})") from None
    return str(tree["model_type"]) if isinstance(tree, dict) and "model_type" in tree else None


def _check_causal(folder: Path, attends: str) -> None:
    if attends != "causal":
        raise BadInput(f"{folder}: the model attends {attends}; likelihoods of text take a causal one")


class _OurRun(Evaluated):
    def __init__(self, folder: Path, data: str | os.PathLike[str] | None, device: str, dtype: torch.dtype) -> None:
        self._model = GPT.from_run(folder).to(device)
        config = self._model.config
        _check_causal(folder, config.attends)
        self._tokenizer = run_tokenizer(folder, data)
        self._device, self._dtype = device, dtype
        self.name, self.context = str(folder), config.context
        self.n_ids, self.end = self._tokenizer.n_ids, self._tokenizer.eot
        if self.n_ids > config.vocab_size:
            raise BadInput(
                f"{folder}: its tokenizer {self._tokenizer.spec} has {self.n_ids:,} ids and the model a vocabulary of "
                f"{config.vocab_size:,}; name the data that it was trained on (--data DIR)"
            )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self._tokenizer.encode_batch(texts)]

    def logits(self, ids_BT: Tensor, lengths_B: Tensor, first: int) -> Tensor:
        kind, halved = self._device.partition(":")[0], self._dtype == torch.bfloat16
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=halved):
            hidden_BTD, _ = self._model.hidden(ids_BT.to(self._device))
            return self._model.logits(hidden_BTD[:, first:])

    def continued(self, ids: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> str:
        from qurve.generate.sampling import Sampling

        (made,) = generate(
            self._model,
            [list(ids)],
            tokenizer=self._tokenizer,
            sampling=Sampling(temperature=0),
            max_new_tokens=max_new_tokens,
            stop=stop,
            dtype=self._dtype,
        )
        return made.text


class _HuggingFace(Evaluated):
    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
        except ImportError:
            raise BadInput(f"{folder} needs the package transformers; `pip install 'qurve[hf]'`") from None
        if model_type(folder) == "qurve":
            importlib.import_module("qurve.hf")  # which makes the model's class known to transformers
        try:
            plain = {
                "local_files_only": True,
                "trust_remote_code": False,
            }  # unsaid, it would ask
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, **plain
            )
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **plain)
        except Exception as error:  # a file that is missing, a class that is unknown: no common base
            why = " ".join(str(error).split())[:200]
            raise BadInput(f"{folder} cannot be loaded by transformers ({type(error).__name__}: {why})") from error
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if keys := sorted(map(str, loaded.get(what, ()))):
                raise BadInput(
                    f"{folder} does not hold a whole causal language model: {what.replace('_', ' ')}: "
                    f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
                )
        if model_type(folder) == "qurve":
            _check_causal(folder, model.config.model.attends)
        self._model = model.to(device).eval()
        self._device, self._rows = device, model.get_input_embeddings().weight.shape[0]
        self._cuts = "logits_to_keep" in inspect.signature(model.forward).parameters
        config, tokenizer = model.config.get_text_config(), self._tokenizer
        context = getattr(config, "max_position_embeddings", None)
        if not isinstance(context, int):
            raise BadInput(f"{folder}: its config.json does not say its context (max_position_embeddings)")
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # which transformers makes up where there is none
            raise BadInput(f"{folder} holds no tokenizer, or one that makes nothing of text")
        end = next((i for i in (tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None), None)
        if end is None:
            raise BadInput(
                f"{folder}: its tokenizer has no end-of-text token, and a text's first one needs one before it"
            )
        before = tokenizer("")["input_ids"][:1]
        self.start = before[0] if before and before == [tokenizer.bos_token_id] else None
        self.name, self.context, self.end = str(folder), context, int(end)
        self.n_ids = min(len(tokenizer), config.vocab_size)
        self._check_ids([self.end, self.first])
        if self._looks_ahead():
            _check_causal(folder, "to tokens that are still to come")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        for ids in encoded:
            self._check_ids(ids)
        return [list(ids) for ids in encoded]

    def _check_ids(self, ids: Sequence[int]) -> None:
        if (largest := max(ids, default=0)) >= self._rows:
            raise BadInput(
                f"{self.name}: its tokenizer gives the id {largest:,}, and its model knows ids below {self._rows:,}; "
                "they do not belong together"
            )

    def _looks_ahead(self) -> bool:
        """Whether other tokens behind it change what is said after the first: that would be no likelihood."""
        ids_BT = torch.full((2, min(8, self.context)), self.first)
        ids_BT[1, 1:] = (self.first + 1) % self.n_ids
        one_V, other_V = self.logits(ids_BT, torch.full((2,), ids_BT.shape[1]), 0)[:, 0].float()
        rounding = 1e-4 if self._model.dtype == torch.float32 else 0.05
        return bool((one_V - other_V).abs().max() > rounding * one_V.abs().max())

    def logits(self, ids_BT: Tensor, lengths_B: Tensor, first: int) -> Tensor:
        ids_BT, length = ids_BT.to(self._device), ids_BT.shape[1]
        places_T = torch.arange(length, device=self._device)
        seen_BT = (places_T < lengths_B.to(self._device)[:, None]).long()
        kept = {"logits_to_keep": length - first} if self._cuts else {}
        with torch.no_grad():
            logits: Tensor = self._model(input_ids=ids_BT, attention_mask=seen_BT, use_cache=False, **kept).logits
        return logits if self._cuts else logits[:, first:]

    def continued(self, ids: Sequence[int], max_new_tokens: int, stop: Sequence[str]) -> str:
        ids_BT = torch.tensor([list(ids)], device=self._device)
        with torch.no_grad():
            made_BT = self._model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=self.end,
                tokenizer=self._tokenizer,
                stop_strings=list(stop) or None,
            )
        text: str = self._tokenizer.decode(made_BT[0, len(ids) :], skip_special_tokens=True)
        return text[: min([len(text), *(at for one in stop if (at := text.find(one)) >= 0)])]
