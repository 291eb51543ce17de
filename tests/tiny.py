"""Trainings that take a fraction of a second: a tiny configuration, real text for it, and one finished run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qurve.config import apply_settings
from qurve.model.config import ModelConfig
from qurve.train.config import DataConfig, EvalConfig, RunConfig, TrainConfig

if TYPE_CHECKING:
    from qurve.data.loader import TokenData
    from qurve.runfolder import RunFolder

TINY = RunConfig(
    ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64, context=32, vocab_size=320),
    DataConfig(tokenizer="bytes"),
    TrainConfig(
        steps=4,
        tokens_per_step=128,
        micro_batch=4,
        lr=1e-2,
        min_lr=1e-3,
        warmup_steps=1,
        precision="float32",
        compile=False,
        threads=1,
        device="cpu",
    ),
    EvalConfig(every=2, windows=6),
)
PAPER_ORDER = ("data.order=paper", "data.order_seed=42")


def tiny(*settings: str) -> RunConfig:
    """The tiny configuration, changed: `tiny("train.lr=0.1")`."""
    return apply_settings(TINY, settings)


class InProcess:
    """A `ProcessPoolExecutor` without processes: a job is done when it is handed over."""

    _processes: dict[int, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def submit(self, function: Callable[..., str], *args: Any) -> Future[str]:
        future: Future[str] = Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **kwargs: Any) -> None: ...


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded corpus as bytes, as the `smoke` preset takes it."""
    from qurve.train.data import open_data

    folder = tmp_path_factory.mktemp("embedded") / "data"
    open_data(DataConfig(tokenizer="bytes"), folder)
    return folder


@pytest.fixture(scope="session")
def data(data_folder: Path) -> TokenData:
    from qurve.data.loader import TokenData

    return TokenData.open(data_folder)


@pytest.fixture(scope="session")
def finished(data: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of the tiny configuration. Tests only read it."""
    from qurve.train.loop import train

    return train(tiny(), tmp_path_factory.mktemp("runs") / "tiny", data)


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    """So little data that the third step of `interrupted.SMALLEST` begins the second epoch."""
    from interrupted import little_data, smallest

    data = little_data(tmp_path_factory.mktemp("little"))
    assert len(data.split("train")) // smallest().model.context < 3 * smallest().sequences
    return data


@pytest.fixture(scope="session")
def undisturbed(little: TokenData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of `interrupted.SMALLEST` that nothing cut short. Tests only read it."""
    from interrupted import smallest
    from qurve.train.loop import train

    return train(smallest(), tmp_path_factory.mktemp("undisturbed") / "run", little)
