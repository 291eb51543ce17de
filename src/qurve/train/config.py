"""`RunConfig`: everything about one training. No torch here; `runtime.resolve` fills what depends on the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qurve.config import NOT_HASHED, check_values, or_else
from qurve.errors import BadInput
from qurve.model.config import ModelConfig
from qurve.ops.heads import Impl
from qurve.train.objective import Causal, ObjectiveConfig

Precision = Literal["auto", "float32", "bf16"]


@dataclass(frozen=True)
class DataConfig:
    """Which tokens, in which order."""

    path: str | None = field(default=None, metadata=NOT_HASHED)
    """A prepared folder. None takes the embedded corpus, prepared beside the run, where `corpus` says "embedded"."""
    corpus: Literal["embedded", "openwebtext"] = field(default="embedded", metadata=NOT_HASHED)
    """What this configuration is made for."""
    tokenizer: str = field(default="gpt2", metadata=NOT_HASHED)
    """How the embedded corpus is tokenised when no `path` is given: `gpt2`, `bytes` or `bpe:N`."""
    fingerprint: str | None = None
    """Hash of the data itself; filled when a run starts."""
    order: Literal["epochs", "paper"] = "epochs"
    """`epochs`: a fresh permutation of the windows each epoch. `paper`: the authors' seeded tables."""
    order_seed: int | None = field(default=None, metadata=or_else("train.seed"))
    """Seed of the order; None takes `train.seed`."""

    def __post_init__(self) -> None:
        check_values(self)


MOST_THREADS = 1024

ABOVE_BOUND = "the loss was above"
"""How a run says that it diverged by its bound, not by a number that is not finite."""


@dataclass(frozen=True)
class TrainConfig:
    """How the weights are updated."""

    seed: int = 1
    """Varies the initial weights, the dropout, and, unless `data.order_seed` is given, the order of the data."""
    objective: ObjectiveConfig = field(default_factory=Causal)
    """What is predicted, in training and in evaluation."""
    steps: int = 60_000
    """Updates of the full schedule."""
    stop_at: int | None = field(default=None, metadata=NOT_HASHED)
    """Stop after this many updates, before the schedule's end; None runs all."""
    tokens_per_step: int = 491_520
    micro_batch: int | None = field(default=None, metadata=or_else("what memory allows"))
    """Sequences in one forward pass; None takes the largest divisor of the step's that keeps memory modest."""
    lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """The schedule's floor."""
    warmup_steps: int = 2_000
    """Linear warm-up: update i (from 0) takes `(i + 1) / (warmup_steps + 1)` of the peak."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    horizon: int | None = field(default=None, metadata=or_else("steps"))
    """Update at which the schedule reaches its floor; None means `steps`."""
    decay_steps: int | None = field(default=None, metadata=or_else("horizon / 5"))
    """Length of the linear decay of `wsd` (warm-up, stable, decay); None means a fifth of the horizon."""
    weight_decay: float = 0.1
    """On matrices and embeddings alone."""
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    precision: Precision = "auto"
    """Dtype of the matrix products (autocast); weights, norms, softmax and loss stay in float32."""
    compile: bool = True
    """Compile the training step where a C++ compiler is found (on a GPU: always)."""
    head_impl: Impl = "auto"
    """How the heads of nonlinear projections are run (`qurve.ops.heads`): the same numbers but for the last bits, for
    whose sake it counts as part of the configuration, as `threads` does. `compiled` is for `compile = false`."""
    threads: int | None = field(default=None, metadata=or_else("all cores"))
    """CPU threads; None takes all cores. Part of the configuration, since it decides the last bits of a sum."""
    device: str = "auto"
    """`cpu`, `cuda`, or `cuda:1`."""
    checkpoint_every: int | None = field(default=None, metadata=NOT_HASHED)
    """Steps between checkpoints; None saves after every evaluation. The last step is always saved."""
    keep: int = field(default=2, metadata=NOT_HASHED)
    """How many of the newest checkpoints are kept, besides the one of the lowest validation loss."""
    keep_every: int | None = field(default=None, metadata=NOT_HASHED)
    """Checkpoints of every so many steps are kept for good."""
    loss_bound: float | None = field(default=None, metadata=NOT_HASHED)
    """A training loss above this, `loss_bound_steps` times in a row, counts as diverged, as does one not finite."""
    loss_bound_steps: int = field(default=10, metadata=NOT_HASHED)
    parallel: Literal["ddp", "fsdp"] | None = field(default=None, metadata=NOT_HASHED)
    """How the processes of one run share the work: `ddp`, each with the whole model, or `fsdp`, each with a part."""
    activation_checkpointing: bool = field(default=False, metadata=NOT_HASHED)
    """Compute each block's activations again in the backward pass, not keep them: less memory, the same numbers."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = field(default=(), metadata=NOT_HASHED)
    """What mirrors `metrics.jsonl`; training goes on when one of them fails."""
    dynamics_every: int | None = field(default=None, metadata=NOT_HASHED)
    """Steps between measurements of what the blocks are like (`qurve.analysis.dynamics`), the first step's among them;
    None measures nothing. Every 100 steps is meant. It changes nothing in training, and is not in its `seconds`."""
    log_every: int = field(default=10, metadata=NOT_HASHED)
    """Steps between printed lines where there is no terminal. `metrics.jsonl` holds every step."""

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("steps", "tokens_per_step", "log_every", "keep", "loss_bound_steps"):
            _at_least(1, name, getattr(self, name))
        optional = ("stop_at", "micro_batch", "horizon", "decay_steps", "threads", "checkpoint_every", "keep_every")
        for name in (*optional, "dynamics_every"):
            if getattr(self, name) is not None:
                _at_least(1, name, getattr(self, name))
        for name in ("seed", "warmup_steps", "lr", "min_lr", "weight_decay", "grad_clip"):
            _at_least(0, name, getattr(self, name))
        if self.threads is not None and self.threads > MOST_THREADS:
            raise BadInput(f"train.threads = {self.threads}: at most {MOST_THREADS} make sense")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"train.{name} = {getattr(self, name)}: it must be at least 0 and below 1")
        if not (self.device in ("auto", "cpu", "cuda") or self.device.removeprefix("cuda:").isdecimal()):
            raise BadInput(f"train.device = {self.device!r} is not auto, cpu, cuda or cuda:N")

    @property
    def last_step(self) -> int:
        """The schedule's horizon, resolved."""
        return self.steps if self.horizon is None else self.horizon

    @property
    def updates(self) -> int:
        """Updates that the run makes."""
        return self.steps if self.stop_at is None else min(self.steps, self.stop_at)


@dataclass(frozen=True)
class EvalConfig:
    """When and on what the loss is measured. Evaluation changes nothing in training."""

    every: int = 1_000
    """Steps between evaluations; the first is made before training, the last after it."""
    windows: int = 2_400
    """Windows an evaluation, each as long as the context. The same for every arm; in `paper` order the authors'."""
    splits: tuple[str, ...] = ("val",)
    attention_logits: bool = field(default=False, metadata=NOT_HASHED)
    """Measure the largest attention logit of each block too, at each evaluation on `val`, on its first few windows."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.attention_logits and "val" not in self.splits:
            raise BadInput("eval.attention_logits are measured on val, which is not in eval.splits; add it there")
        if not self.splits or len(set(self.splits)) < len(self.splits):
            raise BadInput(f"eval.splits = {list(self.splits)}: name at least one split, each once")
        for name in ("every", "windows"):
            _at_least(1, name, getattr(self, name), "eval")


@dataclass(frozen=True)
class RunConfig:
    """One run: a model, its data, its training, its evaluation."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        check_values(self)
        self.train.objective.check(self.model)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints, resolved."""
        return self.train.checkpoint_every or self.eval.every

    @property
    def sequences(self) -> int:
        """Sequences in one step. Raises `BadInput` when the step's tokens do not divide into them."""
        tokens, context = self.train.tokens_per_step, self.model.context
        if tokens % context:
            raise BadInput(
                f"train.tokens_per_step = {tokens} does not divide into sequences of model.context = {context}; "
                f"the nearest number that does is {max(1, round(tokens / context)) * context}"
            )
        return tokens // context


def _at_least(least: float, name: str, value: float, group: str = "train") -> None:
    if value < least:
        raise BadInput(f"{group}.{name} = {value}: it must be at least {least}")
