from __future__ import annotations

import csv
import dataclasses
import io
import re

import pytest
from fake_study import BASELINE, WIDER, arm, write_study
from rich.console import Console

from qurve.study.results import load
from qurve.study.statistics import ROW_KEYS, summary_rows
from qurve.study.tables import (
    CSV_KEYS,
    SETTINGS,
    chance,
    csv_table,
    rate,
    signed,
    terminal_table,
    tex_escape,
    tex_table,
    utilisation_in_words,
)

HOSTILE = r"[red]\input{x} $x_1$ 50 % & #1 ~ ^ <b>"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6e-4, "6e-4"),
        (3.6e-3, "3.6e-3"),
        (5.66e-4, "5.66e-4"),
        (0.1, "0.1"),
        (0.05, "0.05"),
        (0.0, "0"),
        (1e-10, "1e-10"),
    ],
)
def test_rates_are_written_as_people_write_them(value, text):
    assert rate(value) == text
    assert float(text) == value


A100 = {"gpu": "NVIDIA A100-SXM4-80GB", "precision": "bf16", "processes": 4}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "25.0 %"),
        ({"processes": 1}, "100.0 %"),
        ({"gpu": None}, "n/a"),
        ({"gpu": "a made-up GPU"}, "n/a"),
        ({"gpu": ["damaged"]}, "n/a"),
        ({"precision": "float64"}, "n/a"),
        ({"processes": 0}, "n/a"),
    ],
)
def test_utilisation_is_of_all_gpus_together_and_never_guessed(tmp_path, environment, words):
    arm = dataclasses.replace(load(write_study(tmp_path)).baseline, flops_per_token=1e9)
    run = dataclasses.replace(arm.runs[1], tokens_per_s=312e3, environment=A100 | environment)
    assert utilisation_in_words(arm, run) == words
    assert utilisation_in_words(arm, dataclasses.replace(run, tokens_per_s=None)) == "n/a"


def test_signs():
    assert signed(0.938, 2, "%") == "+0.94 %"
    assert signed(-0.0123, 4) == "−0.0123"
    assert signed(-0.00001, 4) == signed(0.0, 4) == "0.0000"
    assert signed(None, 2, "%") == "–"


@pytest.mark.parametrize(
    ("p", "text"),
    [
        (0.0625, ".0625"),
        (0.25, ".25"),
        (1.0, "1"),
        (0.99999, "1"),
        (0.0001, ".0001"),
        (0.00009, "<1e-4"),
        (0.0, "<1e-4"),
        (None, "–"),
    ],
)
def test_chances_take_five_signs(p, text):
    assert chance(p) == text


def test_csv_holds_the_rows_in_full(tmp_path):
    results = load(write_study(tmp_path, fates={("mlp-4.75", 1): "diverged"}))
    read = list(csv.DictReader(io.StringIO(csv_table(results))))
    rows = summary_rows(results)
    assert list(read[0]) == list(CSV_KEYS) == [*ROW_KEYS, "diverged", "weight_decay", "lr", "min_lr"]
    assert [line.pop("diverged") for line in read] == ["0", "1", "0"]
    settings = [[line.pop(key) for key in ("weight_decay", "lr", "min_lr")] for line in read]
    assert settings == [[str(arm.setting(path)) for path in SETTINGS] for arm in results.arms]
    for line, row in zip(read, rows, strict=True):
        assert line == {key: "" if value is None else str(value) for key, value in row.items()}
    assert float(read[2]["diff"]) == rows[2]["diff"]


def test_tex_escapes_every_special_and_counts_its_columns(tmp_path):
    text = tex_table(load(write_study(tmp_path, (BASELINE, arm("new", HOSTILE)))))
    for line in ("\\toprule", "\\midrule", "\\bottomrule", "\\begin{tabular}{lrrrrrrrrrr}", "\\end{tabular}"):
        assert text.count(line) == 1 + (line == "\\midrule")
    body = [line for line in text.splitlines() if line.endswith("\\\\") and not line.startswith("\\multicolumn")]
    assert len(body) == 4
    assert all(len(re.findall(r"(?<!\\)&", line)) == 10 for line in body)
    assert r"{[}red]\textbackslash{}input\{x\} \$x\_1\$ 50 \% \& \#1 \textasciitilde{} \textasciicircum{}" in body[3]
    assert r"$2\cdot10^{-3}$" in body[1]


def test_tex_has_difference_interval_p_and_the_papers_own_figures(tmp_path):
    results = load(write_study(tmp_path))
    text, row = tex_table(results), summary_rows(results)[2]
    (line,) = [line for line in text.splitlines() if line.startswith("Res. GELU")]
    cells = [cell.strip() for cell in line.removesuffix("\\\\").split(" & ")]
    assert cells[5] == "3/3"
    plain = cells[7].replace("$-$", "−").replace("{[}", "[").replace("{]}", "]")
    assert plain == f"{signed(row['diff'], 4)} [{signed(row['diff_low'], 4)}, {signed(row['diff_high'], 4)}]"
    assert cells[8] == tex_escape(chance(row["p_holm"]))
    (papers,) = [line for line in text.splitlines() if "2.8736" in line]
    assert text.splitlines().index(papers) == text.splitlines().index(line) + 1
    assert papers.startswith(
        r"\quad in the paper & \textasciitilde{}0.03 \% & 0.10 & $3.6\cdot10^{-3}$ & $2\cdot10^{-5}$ & --"
    )
    assert r"+2.40 \% & +6.81 \% \\" in papers
    assert "{The paper, as printed: 124 M parameters" in text
    (baseline,) = [line for line in text.splitlines() if line.startswith("Baseline")]
    assert baseline.count("ref.") == 5
    assert "in the paper" not in tex_table(load(write_study(tmp_path / "none", (WIDER,)))).lower()


def test_tex_leaves_no_special_bare():
    escaped = tex_escape("\\{}$&#%_~^")
    bare = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum)\{\}|\\[{}$&#%_]", "", escaped)
    assert bare == ""


def test_terminal_table_shows_numbers_verdict_and_hostile_labels(tmp_path):
    worse = arm("worse", HOSTILE, -0.05)
    results = load(write_study(tmp_path, (BASELINE, worse), fates={("baseline", 9): "missing"}))
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    text = console.export_text()
    row = summary_rows(results)[1]
    assert HOSTILE in text
    assert f"{row['val_loss']:.4f}" in text
    assert "800,000" in text
    assert "3/3" in text
    assert "higher loss than the baseline by" in text
    assert "this model size" in " ".join(text.split())


def test_a_match_is_printed_below_the_table(tmp_path):
    arms = (BASELINE, {**arm("wide", "Wide"), "match": "9 parameters\nof 10"})
    console = Console(file=io.StringIO(), width=100)
    console.print(terminal_table(load(write_study(tmp_path, arms))))
    assert "Wide: 9 parameters of 10.\n" in console.file.getvalue().replace(" \n", "\n").replace("  ", "")


def test_terminal_table_names_what_became_of_an_arm(tmp_path):
    fates = {("mlp-4.75", seed): "diverged" for seed in (1, 2, 3)} | {("res-gelu", 1): "running"}
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal_table(load(write_study(tmp_path, fates=fates))))
    text = console.export_text()
    assert re.search(r"MLP 4.75 +0/3 +900,000 +diverged +–", text)
    assert "no verdict yet: seed 1 running" in " ".join(text.split())


def test_terminal_table_keeps_every_digit_in_80_columns(tmp_path):
    results = load(write_study(tmp_path))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    text = console.export_text()
    assert "…" not in text
    for row in summary_rows(results)[1:]:
        for key in ("diff", "diff_low", "diff_high"):
            assert signed(row[key], 4) in text
        for key in ("p", "p_holm", "p_signflip"):
            assert chance(row[key]) in text
        assert f"{row['tokens_per_s']:,.0f}" in text


def test_an_arm_of_which_some_seeds_diverged_says_so_beside_its_mean(tmp_path):
    results = load(write_study(tmp_path, fates={("mlp-4.75", 1): "diverged"}))
    arm = results.others[0]
    survivors = [run.val[-1][1] for run in arm.runs.values() if run.status == "finished"]
    assert len(survivors) == 2
    mean = f"{sum(survivors) / 2:.4f}"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    assert re.search(rf"MLP 4.75 +2/3 +900,000 +{mean} [^\n]*\n +\(1 diverged\)", console.export_text())
    assert f"& {mean} (1 diverged) &" in tex_table(results)
    (row,) = (row for row in csv.DictReader(io.StringIO(csv_table(results))) if row["arm"] == "mlp-4.75")
    assert "seed 1 diverged" in row["verdict"]


def test_a_diverged_baseline_is_named_in_every_table(tmp_path):
    results = load(write_study(tmp_path, fates={("baseline", seed): "diverged" for seed in (1, 2, 3)}))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table(results))
    assert re.search(r"Baseline +0/3 +800,000 +diverged +–", console.export_text())
    assert "& 0/3 & diverged & ref. & ref." in tex_table(results)
    row = next(csv.DictReader(io.StringIO(csv_table(results))))
    assert (row["val_loss"], row["diverged"], row["verdict"].count("diverged")) == ("diverged", "3", 3)
