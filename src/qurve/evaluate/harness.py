"""lm-eval's tasks on any model that evaluation opens: an adapter, no conversion. Needs the package `lm-eval`, and a
network for tasks whose data lm-eval fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from qurve.errors import BadInput
from qurve.evaluate.likelihood import log_likelihoods
from qurve.evaluate.loss import document_requests
from qurve.evaluate.model import Evaluated
from qurve.evaluate.tasks import as_requests

FILE_SUFFIXES = (".yaml", ".yml")
MOST_NEW_TOKENS = 256
"""What a task that asks for text and names no length gets, as lm-eval's own models give it."""


class HarnessModel(LM):  # type: ignore[misc]
    """A model as lm-eval asks it: `lm_eval.simple_evaluate(HarnessModel(open_model(folder)), tasks=[…])`.

    Everything is scored as the tasks from files are. Text is made by taking the likeliest token; a task that wants to
    draw is refused.
    """

    def __init__(self, model: Evaluated, batch_size: int = 8) -> None:
        super().__init__()
        self._model, self._batch_size = model, batch_size

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        asked = as_requests(self._model, [request.args for request in requests])
        scored = log_likelihoods(self._model, asked, batch_size=self._batch_size)
        return [(one.log_likelihood, one.greedy) for one in scored]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        context = self._model.context
        found = []
        for ids in self._model.encode([request.args[0] for request in requests]):
            asked = document_requests(self._model, ids, context, context)
            scored = log_likelihoods(self._model, asked, batch_size=self._batch_size)
            found.append(sum(one.log_likelihood for one in scored))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._made(*request.args) for request in requests]

    def _made(self, prompt: str, wanted: dict[str, Any]) -> str:
        if wanted.get("do_sample") or wanted.get("temperature"):
            raise BadInput("the task wants text to be drawn; this adapter takes the likeliest token alone")
        until = wanted.get("until") or []
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        most = int(wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or MOST_NEW_TOKENS)
        (ids,) = self._model.encode([prompt])
        before = [self._model.first] if self._model.start is not None or not ids else []
        ids, context = [*before, *ids], self._model.context
        most = min(most, max(context - len(ids), context // 2))  # so that half of it at least is the prompt's
        ids = ids[-(context - most) :]
        return self._model.continued(ids, most, stop)


def run_harness(
    model: Evaluated, tasks: Sequence[str], *, limit: int | None = None, batch_size: int = 8
) -> dict[str, dict[str, Any]]:
    """lm-eval's own numbers: task or group -> metric -> value. `tasks` are lm-eval's names, or task files of its kind
    (`.yaml`). Raises `BadInput` for a task that it does not know or cannot get the data of.
    """
    files = all(task.endswith(FILE_SUFFIXES) for task in tasks)
    for task in tasks:
        if task.endswith(FILE_SUFFIXES) and not Path(task).is_file():
            raise BadInput(f"{task} does not exist; give a task file of lm-eval's, or the name of one of its tasks")
    manager = TaskManager(include_defaults=not files)  # finding its own tasks takes seconds
    try:
        found = simple_evaluate(
            HarnessModel(model, batch_size), tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False
        )
    except BadInput:
        raise
    except Exception as error:  # its errors, and those of what fetches its data, have no common base
        why = (str(error).strip().splitlines() or [""])[0]
        raise BadInput(
            f"lm-eval cannot evaluate {', '.join(tasks)} ({type(error).__name__}: {why}); `lm-eval ls tasks` lists its "
            "tasks, and their data need a network"
        ) from error
    assert found is not None
    return {task: dict(metrics) for task, metrics in found["results"].items()}
