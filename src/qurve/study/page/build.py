"""The page, whole: the verdict on top, then the sections, then the script with what it needs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from qurve.study.figures import colour_index, figures_of
from qurve.study.headline import headline
from qurve.study.page.pieces import Section, environment, text
from qurve.study.page.plots import PLOTS
from qurve.study.page.sections import SECTIONS
from qurve.study.results import Arm, StudyResults, doubts
from qurve.study.statistics import Comparison, comparisons, overall_verdict, scope


def page(results: StudyResults, more: Sequence[Section] = ()) -> str:
    """`report.html`; the sections of `more` come after the first of the page's own."""
    from markupsafe import Markup

    first, *rest = SECTIONS
    fragments = [(section.title, section.fragment(results)) for section in (first, *more, *rest)]
    pairs = comparisons(results)
    top = headline(results)
    colour = 0 if top is None or top.arm is None else colour_index(results, top.arm)
    cards = [_card(results, arm, pair) for arm, pair in zip(results.others, pairs, strict=True)]
    return (
        environment()
        .get_template("page.html")
        .render(
            results=results,
            css=Markup(text("page.css")),
            scripts=[script(source) for source in (plotly(), text("page.js"))],
            plots={name: Markup(safe_json(PLOTS[name](results))) for name in figures_of(results) if name in PLOTS},
            sections=[{"title": title, "fragment": Markup(html)} for title, html in fragments if html is not None],
            verdict=overall_verdict(results),
            headline=None if top is None else {**vars(top), "colour": colour},
            scope=scope(results, pairs),
            cards=[card for card in cards if card["arm"].matched is None],
            matched=[card for card in cards if card["arm"].matched is not None],
            doubts=doubts(results),
            progress=f"{sum(run.finished for run in results.runs)} of {len(results.runs)}",
        )
    )


def _card(results: StudyResults, arm: Arm, pair: Comparison) -> dict[str, Any]:
    word = {"lower": "lower loss", "higher": "higher loss", "noise": "not told apart", "none": "no verdict"}
    return {"arm": arm, "pair": pair, "word": word[pair.outcome], "colour": colour_index(results, arm)}


def script(source: str) -> dict[str, Any]:
    """A script and what the page's policy calls it: nothing else may run there, whatever a label holds."""
    from markupsafe import Markup

    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as a browser reads it, or the hash is another's
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return {"source": Markup(source), "allowed": Markup(f"'sha256-{digest}'")}


def plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def safe_json(tree: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
