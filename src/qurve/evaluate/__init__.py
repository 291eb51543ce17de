"""Measures of a trained model: loss on text, and likelihood tasks. Nothing here needs a network.

    from qurve.evaluate import evaluate_task, open_model, read_task, text_loss

    model = open_model(folder)  # a run's folder, or a Hugging Face model's
    print(text_loss(model, documents).bits_per_byte)
    print(evaluate_task(model, read_task("arc_easy.jsonl.zst")).accuracy)

`model` is a model as evaluation sees it, `likelihood` the one way in which anything is scored, `loss` and `tasks` the
measures, `harness` the door for lm-eval's tasks.
"""

from qurve.evaluate.likelihood import Request, Scored, log_likelihoods
from qurve.evaluate.loss import Loss, split_loss, text_loss
from qurve.evaluate.model import Evaluated, open_model
from qurve.evaluate.tasks import Task, TaskResult, evaluate_task, read_task

__all__ = [
    "Evaluated",
    "Loss",
    "Request",
    "Scored",
    "Task",
    "TaskResult",
    "evaluate_task",
    "log_likelihoods",
    "open_model",
    "read_task",
    "split_loss",
    "text_loss",
]
