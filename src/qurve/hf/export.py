"""A trained run as a folder for others, and such a folder as a run: `qurve export` and `qurve import`.

Nothing is left half-written, and nothing leaves without a check: what was written is read back, and its logits have to
be the run's. Rows that only pad the embedding stay behind, so that nobody can make their ids.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from qurve.config import FORMAT, content_hash, from_dict, from_json, to_json
from qurve.data.tokenizers import END_OF_TEXT, TOKENIZER_FILE, Tokenizer, load_trained, ready_made
from qurve.errors import BadInput, QurveError
from qurve.files import write_atomic, write_manifest
from qurve.generate.text import run_data, run_tokenizer
from qurve.hf.card import card
from qurve.hf.configuration import QurveConfig
from qurve.hf.modeling import QurveForCausalLM
from qurve.hf.stock import from_stock, to_stock
from qurve.model.config import ModelConfig
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder
from qurve.train.config import DataConfig, RunConfig, TrainConfig
from qurve.train.objective import MaskedTokens, ObjectiveConfig

Target = Literal["hf", "safetensors", "stock"]
WEIGHTS, CONFIG = "model.safetensors", "config.json"
MASK = "<|mask|>"
CLOSE = 1e-5
"""How far logits may be apart, beside the largest where that is above one."""
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Moved:
    """What came of an export or an import."""

    folder: str
    kind: str
    """The class that it is now, or `safetensors`."""
    tokenizer: str | None
    rows: int
    """Of the embedding: ids that the model knows."""
    logits: float
    """The largest difference of the logits on some random ids."""


def export(
    run: str | os.PathLike[str], out: str | os.PathLike[str], to: Target, data: str | os.PathLike[str] | None = None
) -> Moved:
    """Write a run's newest checkpoint into the new folder `out`, with its tokenizer.

    `hf`: a `QurveForCausalLM`, for any arm. `stock`: a GPT-2 or Llama of transformers' own, for arms that it can
    represent. `safetensors`: our weights by our names, and our configuration. `data`: where the run's data is now.
    Raises `BadInput` with nothing written.
    """
    model, folder = GPT.from_run(run), RunFolder(run)
    tokenizer, ids, mask = _ids(folder, model.config, data)
    trimmed = with_rows(model, ids)
    tokens = dict.fromkeys(TOKENS, None if tokenizer is None else tokenizer.eot)
    with _new_folder(Path(out)) as part:
        if to == "safetensors":
            weights = {name: tensor.contiguous() for name, tensor in trimmed.state_dict().items()}
            save_file(weights, part / WEIGHTS)
            write_atomic(part / CONFIG, to_json(trimmed.config))
            if tokenizer is not None:
                write_atomic(part / TOKENIZER_FILE, tokenizer.as_json())
            kind, again = "safetensors", _asked(load_weights(part))
        else:
            theirs = to_stock(trimmed, **tokens) if to == "stock" else as_hub_model(trimmed, **tokens)
            theirs.generation_config = GenerationConfig(**tokens)
            theirs.save_pretrained(part)
            if tokenizer is not None:
                hub_tokenizer(tokenizer, model.config.context, mask=mask).save_pretrained(part)
            kind = type(theirs).__name__
            write_atomic(part / "README.md", card(folder, trimmed.config, kind, tokenizer, len(ids) - mask))
            again = _asked(_read_theirs(part))
        apart = _difference(_asked(model), again, trimmed.config, ids)
    return Moved(str(out), kind, None if tokenizer is None else tokenizer.spec, len(ids), apart)


def import_folder(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> Moved:
    """Make a run folder of a folder that `export` wrote, or of a GPT-2 or Llama that somebody else saved.

    It holds one checkpoint, and no metrics. Its tokenizer comes along where it is one of ours (GPT-2's is).
    Raises `BadInput` with nothing written.
    """
    source = Path(source)
    model, kind, asked = _read(source)
    tokenizer = _our_tokenizer(source)
    objective = next(k for k in ObjectiveConfig.registry.values() if k.attends == model.config.attends)()
    spec = DataConfig().tokenizer if tokenizer is None else tokenizer.spec
    config = RunConfig(model.config, DataConfig(tokenizer=spec), TrainConfig(objective=objective))
    with _new_folder(Path(out)) as part:
        run = RunFolder(part)
        run.create(to_json(config), content_hash(config), {"imported": {"from": source.name, "kind": kind}})
        checkpoint = run.checkpoint(0)
        checkpoint.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, checkpoint / WEIGHTS)
        write_manifest(checkpoint)
        run.set_status("finished", step=0, why="imported")
        if tokenizer is not None:
            own = part / "tokenizer"
            own.mkdir()
            tokenizer.save(own)
            stated = {"tokenizer": {"spec": tokenizer.spec, "sha256": tokenizer.sha256}}
            write_atomic(own / "manifest.json", json.dumps(stated, indent=2) + "\n")
        rows = model.config.vocab_size
        apart = _difference(asked, _asked(GPT.from_run(part)), model.config, range(rows))
    return Moved(str(out), kind, None if tokenizer is None else tokenizer.spec, rows, apart)


def read_model(source: str | os.PathLike[str]) -> GPT:
    """Our model of such a folder: float32, in evaluation mode, its logits compared with theirs on some random ids.

    Raises `BadInput` for what `import_folder` refuses.
    """
    model, _, asked = _read(Path(source))
    _difference(asked, _asked(model), model.config, range(model.config.vocab_size))
    return model


def as_hub_model(model: GPT, **tokens: int | None) -> QurveForCausalLM:
    """A `QurveForCausalLM` that has this model's weights."""
    hub = QurveForCausalLM(QurveConfig(qurve=model.config, **tokens))
    hub.gpt.load_state_dict(model.state_dict())
    hub.eval()
    return hub


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""All three are the end of text, with which a document begins and ends; padding is never looked at."""


def hub_tokenizer(tokenizer: Tokenizer, context: int, *, mask: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers have them: the same ids for every text, and no special token read out of one."""
    import tokenizers

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.as_json()),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        **({"mask_token": MASK} if mask else {}),
        model_max_length=context,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def with_rows(model: GPT, ids: Sequence[int]) -> GPT:
    """The model with these rows of its embedding (and head) alone, in this order."""
    if list(ids) == list(range(model.config.vocab_size)):
        return model
    with torch.device("meta"):
        trimmed = GPT(dataclasses.replace(model.config, vocab_size=len(ids)))
    state = dict(model.state_dict())
    for name in {"token_embedding.weight", "head.weight"} & state.keys():
        state[name] = state[name][list(ids)]
    trimmed.load_state_dict(state, assign=True)
    return trimmed.eval()


def load_weights(folder: str | os.PathLike[str]) -> GPT:
    """The model of a folder written by `export(…, "safetensors")`."""
    folder = Path(folder)
    config = from_json(ModelConfig, _text(folder / CONFIG), str(folder / CONFIG))
    with torch.device("meta"):
        model = GPT(config)
    try:
        model.load_state_dict(load_file(folder / WEIGHTS), assign=True)
    except Exception as error:
        raise BadInput(f"{folder / WEIGHTS} does not hold the model of its {CONFIG}: {error}") from None
    return model.eval()


# --------------------------------------------------------------------------------------------------------------- pieces


def _ids(
    run: RunFolder, config: ModelConfig, data: str | os.PathLike[str] | None
) -> tuple[Tokenizer | None, list[int], bool]:
    """The run's tokenizer, the ids that are tokens, and whether one more stands behind them: the mask."""
    tree = run.config_json()[0]
    objective = from_dict(RunConfig, {k: v for k, v in tree.items() if k != "format"}).train.objective
    every = config.vocab_size
    if "imported" in run.environment() and data is None:
        own = (run.path / "tokenizer").is_dir()
        return run_tokenizer(run.path) if own else None, list(range(every)), False
    opened = run_data(run.path, data)
    tokenizer = None if opened.tokenizer == UNKNOWN else run_tokenizer(run.path, data)
    masks = [objective.mask_in(config)] if isinstance(objective, MaskedTokens) else []
    return tokenizer, [*range(opened.n_ids), *masks], bool(masks)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when all is there and right. Raises `BadInput` where `out` is in use."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInput(f"{out} is not empty; give another --out, or remove it first")
    part = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.part")
    made = [folder for folder in part.parents if not folder.exists()]
    try:
        try:
            part.mkdir(parents=True)
        except OSError as error:
            raise BadInput(f"{out} cannot be made ({error.strerror}); give another --out") from None
        yield part
        os.replace(part, out.absolute())
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _read(source: Path) -> tuple[GPT, str, Asked]:
    """A folder's model as ours, the class that it is there, and how that one is asked for logits."""
    if "model_type" not in _config_of(source):
        model = load_weights(source)
        return model, "safetensors", _asked(model)
    theirs = _read_theirs(source)
    try:
        model = theirs.gpt if isinstance(theirs, QurveForCausalLM) else from_stock(theirs)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    return model, type(theirs).__name__, _asked(theirs)


def _config_of(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; name one that holds a {CONFIG}")
    text = _text(folder / CONFIG)
    if RunFolder(folder).metrics_file.exists():
        raise BadInput(f"{folder} is a run's folder already, which every command reads as it is")
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise BadInput(f"{folder / CONFIG}: not JSON ({error})") from None
    if not isinstance(tree, dict) or ("model_type" not in tree and tree.get("format") != FORMAT):
        raise BadInput(f"{folder / CONFIG} has no model_type, and is not of our format {FORMAT}: what model is it?")
    if tree.get("model_type", "qurve") not in ("qurve", "gpt2", "llama"):
        raise BadInput(f"{folder} holds a {tree['model_type']!r} model; qurve, gpt2 and llama can be imported")
    return tree


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file} cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _read_theirs(folder: Path) -> PreTrainedModel:
    """The model of a folder, in float32; no code of the folder's is run, and nothing is looked up elsewhere."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except BadInput as error:
        told = str(error)
        raise BadInput(told if told.startswith(str(folder)) else f"{folder}: {told}") from None
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise BadInput(f"{folder} holds no whole model ({type(error).__name__}: {told})") from error
    wrong = [*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"]]
    if wrong:
        raise BadInput(f"{folder}: its parameters are not this model's: {', '.join(sorted(map(str, wrong))[:6])}")
    read: PreTrainedModel = model.eval()
    return read


def _our_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder as one of ours; None where it is not."""
    try:
        tree = json.loads((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        for spec in ("bytes", "gpt2"):
            own = ready_made(spec)
            known = json.loads(own.as_json())
            if _vocabulary(tree) == _vocabulary(known):
                return own
        plain = (
            tree.get("normalizer") is None and tree["decoder"]["type"] == tree["pre_tokenizer"]["type"] == "ByteLevel"
        )
        return load_trained(folder / TOKENIZER_FILE) if plain else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _vocabulary(tree: dict[str, Any]) -> tuple[Any, ...]:
    """What decides the ids of a byte-level tokenizer."""
    merges = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in tree["model"]["merges"]]
    steps = tree.get("normalizer"), tree["pre_tokenizer"]
    return tree["model"]["type"], tree["model"]["vocab"], merges, *steps


Asked = Callable[[Tensor], Tensor]


def _asked(model: GPT | PreTrainedModel) -> Asked:
    """Ids `[B, T]` -> logits `[B, T, V]`, whoever's model it is."""
    ours = model.gpt if isinstance(model, QurveForCausalLM) else model

    @torch.no_grad()
    def ask(ids_BT: Tensor) -> Tensor:
        limits: dict[str, Any] = {}
        if isinstance(ours, GPT) and ours.config.attends == "prefix":
            name = "prefix_B" if model is ours else "prefix_lengths"
            limits[name] = torch.full((len(ids_BT),), ids_BT.shape[1] // 2)
        found = model(ids_BT, **limits)
        logits_BTV: Tensor = found if isinstance(found, Tensor) else found.logits
        return logits_BTV

    return ask


def _difference(before: Asked, after: Asked, config: ModelConfig, ids: Sequence[int]) -> float:
    """The largest difference of logits on random ids. Raises `QurveError` where they are not the same model's."""
    length = min(config.context, 64)
    probe_BT = torch.randint(len(ids), (2, length), generator=torch.Generator().manual_seed(0))
    kept = torch.tensor(list(ids))
    expected, found = before(kept[probe_BT])[..., kept], after(probe_BT)
    apart = (found - expected).abs().max().item()
    if not apart <= CLOSE * max(1.0, expected.abs().max().item()):
        raise QurveError(f"what was written does not compute what was read: logits differ by {apart:.3g}")
    return apart
