"""Text from the command line: what is shown, what is printed, what is refused."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import call, words
from qurve.cli import main
from qurve.generate import Sampling, generate, loop, run_tokenizer
from qurve.model.gpt import GPT
from qurve.runfolder import RunFolder

PLAIN = ("--precision", "float32", "--max-new-tokens", 8)


def made(run: RunFolder, prompts: list[str], **options: Any) -> list[str]:
    """The texts that the library makes."""
    model, tokenizer = GPT.from_run(run.path), run_tokenizer(run.path)
    sampling = Sampling(**{name: options.pop(name) for name in ("temperature", "top_k", "seed") if name in options})
    results = generate(model, prompts, tokenizer=tokenizer, sampling=sampling, max_new_tokens=8, **options)
    return [one.text for one in results]


def test_a_text_is_shown_behind_its_prompt_and_nothing_else(finished: RunFolder) -> None:
    done = call("generate", finished.path, "The people", *PLAIN, "--temperature", 0)
    (text,) = made(finished, ["The people"], temperature=0)
    assert (done.code, done.out) == (0, f"The people{text}\n")
    assert words(done.err).startswith("8 tokens, the first after ")
    assert done.err.endswith("ended: length\n")


def test_several_texts_come_one_after_the_other(finished: RunFolder) -> None:
    options = ("--seed", 4, "--top-k", 9, "--samples", 2)
    done = call("generate", finished.path, "The", "Of a people", *PLAIN, *options)
    texts = made(finished, ["The", "Of a people"], seed=4, top_k=9, samples=2)
    assert len(set(texts)) == 4
    headings = ["prompt 1, sample 1\nThe", "prompt 1, sample 2\nThe"]
    headings += ["prompt 2, sample 1\nOf a people", "prompt 2, sample 2\nOf a people"]
    assert done.out == "".join(f"--- {heading}{text}\n" for heading, text in zip(headings, texts, strict=True))
    assert "32 tokens" in done.err
    assert "ended: 4 length" in done.err


def test_one_document_has_it_all(finished: RunFolder) -> None:
    done = call("generate", finished.path, "The", "Of", *PLAIN, "--samples", 2, "--json")
    assert done.json["run"] == str(finished.path)
    assert [(row["prompt"], row["sample"], row["why"]) for row in done.json["texts"]] == [
        (prompt, sample, "length") for prompt in ("The", "Of") for sample in (0, 1)
    ]
    assert [row["text"] for row in done.json["texts"]] == made(finished, ["The", "Of"], samples=2)
    assert [bytes(row["ids"]).decode(errors="replace") for row in done.json["texts"]] == [
        row["text"] for row in done.json["texts"]
    ]
    assert done.json["tokens"] == 32
    assert done.json["seconds"] > done.json["seconds_to_first"] > 0
    assert done.err == ""


def test_prompts_come_from_standard_input_and_files_or_begin_a_document(
    finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("of the\n\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve\n"))
    done = call("generate", finished.path, "-", "The", "--prompt-file", tmp_path / "prompt.txt", *PLAIN, "--json")
    assert [row["prompt"] for row in done.json["texts"]] == ["naïve", "The", "of the\n"]
    done = call("generate", finished.path, *PLAIN, "--temperature", 0)
    assert done.out == made(finished, [""], temperature=0)[0] + "\n"


def test_a_stop_text_ends_it_and_the_context_does(finished: RunFolder) -> None:
    (text,) = made(finished, ["The"], temperature=0)
    done = call("generate", finished.path, "The", *PLAIN, "--temperature", 0, "--stop", "§", "--stop", text[3:5])
    assert done.out == f"The{text[: text.index(text[3:5])]}\n"
    assert "ended: stop" in done.err
    full = call("generate", finished.path, "The", "--precision", "float32", "--json").json["texts"][0]
    assert (full["why"], len(full["ids"])) == ("context", 29)
    slid = call("generate", finished.path, "The", "--max-new-tokens", 50, "--beyond", "slide", "--json").json
    assert (slid["texts"][0]["why"], slid["tokens"]) == ("length", 50)


def test_ctrl_c_ends_the_line_and_leaves_with_130(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    add, count = loop._Text.add, iter(range(9))

    def interrupted(self: Any, token: int) -> Any:
        if next(count) == 3:
            raise KeyboardInterrupt
        return add(self, token)

    monkeypatch.setattr(loop._Text, "add", interrupted)
    stopped = call("generate", finished.path, "The", *PLAIN, "--temperature", 0)
    assert stopped.code == 130
    monkeypatch.undo()
    assert stopped.out == f"The{made(finished, ['The'], temperature=0)[0][:3]}\n"
    assert stopped.err == "qurve: interrupted\n"


def test_a_terminal_gets_no_control_characters(finished: RunFolder) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    prompt = "a\x1b[2Jb\n"
    terminal, arguments = Terminal(), ("generate", finished.path, prompt, *PLAIN)
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    assert terminal.getvalue().startswith("a\ufffd[2Jb\n")
    assert call("generate", finished.path, prompt, *PLAIN).out.startswith(prompt)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("RUN The --temperature -1", "temperature = -1.0: it must be 0, or 1e-30 to 1e30"),
        ("RUN The --top-k 0", "top_k = 0: it must be a whole number, at least 1"),
        ("RUN The --top-p 1.5", "top_p = 1.5: it must be above 0 and at most 1"),
        ("RUN The --max-new-tokens 0", "max_new_tokens = 0: it must be a whole number, at least 1"),
        ("RUN The --max-new-tokens 30", "prompt 1 has 3 tokens; with 30 new ones that is 33, and the model's context"),
        ("RUN The --beyond slide", "give max_new_tokens"),
        ("RUN The --beyond wrap", "invalid choice 'wrap'"),
        ("RUN The --precision fp16", "invalid choice 'fp16'"),
        ("RUN The --device tpu", "'tpu' is not auto, cpu, cuda or cuda:N"),
        ("RUN The --samples many", "many"),
        ("RUN The --compile --samples 2", "compile: on a CPU it is for one sequence at a time, not for 2"),
        ("RUN - -", "standard input can be one prompt alone"),
        ("RUN --prompt-file missing", "--prompt-file missing cannot be read (No such file or directory)"),
        ("RUN --prompt-file latin.txt", "--prompt-file latin.txt is not UTF-8"),
        ("RUN The --data .", "no prepared data: it holds neither manifest.json nor train.bin"),
        ("missing The", "missing is not a run folder: it has no config.json"),
        ("", "RUN"),
    ],
)
def test_refusals_leave_with_2(
    arguments: str, said: str, finished: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    refused = call("generate", *(str(finished.path) if word == "RUN" else word for word in arguments.split()))
    assert (refused.code, refused.out) == (2, "")
    assert said in words(refused.err)


def test_compiling_needs_a_compiler(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    refused = call("generate", finished.path, "The", *PLAIN, "--compile")
    assert (refused.code, refused.out) == (2, "")
    assert "--compile: no C++ compiler is found" in words(refused.err)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # torch's own, as its compiler is imported
def test_a_compiled_text_is_the_same(finished: RunFolder) -> None:
    done = call("generate", finished.path, "The people", *PLAIN, "--temperature", 0, "--compile")
    (text,) = made(finished, ["The people"], temperature=0)
    assert (done.code, done.out) == (0, f"The people{text}\n")
