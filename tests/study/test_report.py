from __future__ import annotations

import base64
import errno
import hashlib
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_study import BASELINE, NONLINEAR, WIDER, arm, config, write_study

from commands import call
from qurve.errors import BadInput
from qurve.study.report import write_report

HOSTILE = "<script>alert(1)</script>{{ 7 * 7 }} & " + "long" * 30
MESSY = (
    BASELINE,
    WIDER,
    NONLINEAR,
    arm("hostile", HOSTILE, -0.05, config=config(train__weight_decay=0.05)),
    arm("undecided", "Undecided", 0.001),
)
NAMES = ("baseline", "mlp-4.75", "res-gelu")
FATES = {("mlp-4.75", 2): "diverged", ("res-gelu", 3): "missing", ("hostile", 1): "failed", ("undecided", 1): "running"}


def text_of(page: Path) -> str:
    body = re.sub(r"<(style|svg|script)\b.*?</\1>", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).replace("\u00a0", " ").split())


@pytest.fixture
def undrawn(monkeypatch):
    """For tests of words: figures cost most of a report's second."""
    monkeypatch.setattr("qurve.study.page.pieces.svg", lambda *_, **__: "<svg></svg>")
    monkeypatch.setattr("qurve.study.drawing.svg", lambda *_, **__: "<svg></svg>")
    monkeypatch.setattr("qurve.study.drawing.png", lambda _: b"")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_report(write_study(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    return write_report(write_study(tmp_path_factory.mktemp("messy"), MESSY, fates=FATES, search=False))


def test_the_page_says_what_was_found_and_how_it_is_known(whole):
    text = text_of(whole)
    for words in (
        "Is a nonlinear query worth it?",
        "lower loss than the baseline by 0.05",
        "Cannot be told apart from the noise (3 seeds).",
        "95 % interval",
        "this model size, this data and this training length",
        "not corrected for comparing 2 arms",
        "+12.5 %",
        "+0.064 %",
        "2.8736",  # the paper's printed value, and that it is of another scale
        "another scale",
        "Shown: every arm saw the same batches.",
        "seed 2: 3 arms, 400 updates, all the same",
        "model.query.kind linear linear bottleneck",
        "train.lr 2e-3 4e-3 8e-3",
        "a made-up processor",
        "tokens/s MFU configuration",
        "The lowest of 2 arms: the verdict is corrected for 2 (Holm), its interval is not.",
        "from the smallest to the largest",  # what the bands are
        "f" * 64,  # the data's fingerprint
        "git checkout " + "0" * 40,
        "qurve train small/",
        "n/a where none is known",
        "8.22",  # the loss at the start
        "step 400",
        "results/search.json",
        "did not finish",
        "qurve compare small --seeds 3",
    ):
        assert words.lower() in text.lower(), words
    assert text.partition("Before you believe it")[2].strip().startswith("The search chose on the validation split")
    assert "train.seed" not in text


def test_what_went_wrong_is_named_and_never_averaged_in(messy):
    text = text_of(messy)
    for words in (
        "Before you believe it",
        "No verdict: seed 2 diverged.",
        "No verdict yet: seed 3 not run.",
        "No verdict yet: seed 1 failed.",
        "No verdict yet: seed 1 running.",
        "diverged (after step 140: the loss is not finite)",
        "running (step 140)",
        "11 of 15 runs finished",
        "An untuned comparison can say the opposite",
        "The same wherever two arms ran; some runs are missing.",
    ):
        assert words in text, words
    assert "Lower loss than the baseline" not in text
    assert HOSTILE in text


def test_a_match_is_noted_with_its_arm(undrawn, tmp_path):
    arms = (BASELINE, {**arm("wide", "Wide"), "match": "9 parameters where 10 were wanted"})
    text = text_of(write_report(write_study(tmp_path, arms)))
    assert text.count("Matched: 9 parameters where 10 were wanted.") == 1


def test_other_batches_are_shouted(undrawn, tmp_path):
    page = write_report(write_study(tmp_path, fates={("res-gelu", 2): "other-batches"}))
    text = text_of(page)
    assert "Not so: the arms did not see the same batches." in text
    assert text.count("seed 2: baseline and res-gelu did not see the same batch at step 7") >= 3


def test_one_file_needs_nothing_else(whole, messy):
    for page in (whole, messy):
        source = page.read_text(encoding="utf-8")
        assert not re.findall(r'<script[^>]* src|<link[^>]* href="(?!data:)', source)
        source = re.sub(r"<script\b.*?</script>", " ", source, flags=re.DOTALL)
        assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', source)
        assert not re.findall(r"url\((?!#)", source)
        ids = re.findall(r'\bid="([^"]+)"', source)
        assert len(ids) == len(set(ids))
        assert {link[1:] for link in re.findall(r'href="(#[^"]+)"', source)} <= set(ids)


def test_no_script_runs_but_the_pages_own_two(messy):
    source = messy.read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", source, flags=re.DOTALL)
    assert len(scripts) == 2
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', source)[1]
    assert policy.endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in hashes))
    assert "default-src 'none'" in policy
    assert source.count("plotly.js v") == 1


def test_the_folder_holds_table_and_figures_and_nothing_half_written(whole, messy):
    figures = {f"{name}.{kind}" for name in ("curves", "gains", "differences", "search") for kind in ("svg", "png")}
    files = {file.name for file in whole.parent.iterdir()}
    assert files == figures | {"report.html", "report.md", "table.csv", "table.tex", "evidence.json"}
    assert (whole.parent / "report.md").read_text(encoding="utf-8").startswith("## Is a nonlinear query worth it?")
    assert {file.name for file in messy.parent.iterdir()} == files - {"search.svg", "search.png"}
    assert all(file.stat().st_size > 100 for file in whole.parent.iterdir())


@pytest.mark.slow
def test_the_same_study_gives_the_same_bytes(whole):
    before = {file.name: file.read_bytes() for file in whole.parent.iterdir()}
    write_report(whole.parent.parent)
    assert {file.name: file.read_bytes() for file in whole.parent.iterdir()} == before


def test_another_study_is_set_beside(undrawn, tmp_path, whole):
    study = write_study(tmp_path / "here", finals={("res-gelu", seed): 3.0 for seed in (1, 2, 3)})
    text = text_of(write_report(study, whole.parent.parent))
    assert "The same arms in the study small" in text
    assert "The same loss (3 seeds)." in text
    assert "Lower loss here than there by " in text
    assert "### Against small" in (study / "report" / "report.md").read_text(encoding="utf-8")


def test_an_unequal_study_is_refused_before_anything_is_written(tmp_path, whole):
    study = write_study(tmp_path, fates=dict.fromkeys(((n, s) for n in NAMES for s in (1, 2, 3)), "failed"))
    with pytest.raises(BadInput, match="no seed is finished in both"):
        write_report(study, whole.parent.parent)
    assert not (study / "report").exists()


def test_a_full_disk_is_named_and_leaves_nothing_half_written(undrawn, monkeypatch, tmp_path):
    folder = write_study(tmp_path, (BASELINE, NONLINEAR), seeds=(1,), search=False)
    room, fsync = [1, 2], os.fsync

    def synced(handle):
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")  # as the system says it: without a path
        room.pop()
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    done = call("report", folder)
    assert {file.name for file in folder.glob("report/*")} == {"table.csv", "table.tex"}
    assert done.code == 2
    assert f"{folder}/report/evidence.json cannot be written (No space left on device)" in done.err


@pytest.mark.parametrize("way", ["report", "report/table.tex", "report/report.html"])
def test_what_stands_in_the_reports_way_is_named_and_left_alone(undrawn, way, tmp_path):
    folder = write_study(tmp_path, (BASELINE, NONLINEAR), seeds=(1,), search=False)
    if way == "report":
        (folder / way).write_text("mine")
    else:
        (folder / way).mkdir(parents=True)
    done = call("report", folder)
    assert done.code == 2
    assert f"{folder / way} cannot be written" in done.err
    assert list(folder.rglob(".*")) == []
    assert (folder / way).is_dir() == (way != "report")


def test_a_single_arm_and_a_single_seed_are_reported(undrawn, tmp_path):
    assert "nothing to compare" in text_of(write_report(write_study(tmp_path / "arm", (BASELINE,))))
    assert "One seed: no verdict." in text_of(write_report(write_study(tmp_path / "seed", seeds=(1,))))


@pytest.mark.parametrize(("gains", "is_bold"), [((0.07, 0.06, 0.08), True), ((0.07, -0.01, 0.08), False)])
def test_the_best_arm_is_bold_only_when_its_loss_is_shown_to_be_lower(undrawn, tmp_path, gains, is_bold):
    finals = {("baseline", seed): 3.0 for seed in (1, 2, 3)}
    finals |= {("new", seed): 3.0 - gain for seed, gain in enumerate(gains, 1)}
    page = write_report(write_study(tmp_path, (BASELINE, arm("new", "New")), finals=finals))
    bold = re.findall(r'<tbody class="best">.*?</tbody>', page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(bold) == is_bold
    assert all("New" in row for row in bold)


def test_a_ladder_is_not_set_against_a_study(tmp_path):
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "ladder.json").write_text("{}")
    other = write_study(tmp_path / "study", (BASELINE, NONLINEAR), seeds=(1,), search=False, every=100)
    with pytest.raises(BadInput, match=r"ladder is not a study folder: it has no study\.json"):
        write_report(tmp_path / "ladder", other)
    assert [entry.name for entry in (tmp_path / "ladder").iterdir()] == ["ladder.json"]


def test_nothing_is_made_where_there_is_no_study(tmp_path):
    with pytest.raises(BadInput, match="not a study folder"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_imported_before_it_is_needed():
    heavy = "scipy matplotlib jinja2 plotly rich torch numpy"
    script = f"import sys, qurve.study.report; print([m for m in {heavy.split()} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
