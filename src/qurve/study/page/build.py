"""The page, whole: the verdict on top, then the sections, then the script with what it needs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from qurve.study.figures import colour_index, figures_of
from qurve.study.headline import alarms, headline, reservations
from qurve.study.holds import has_maps
from qurve.study.page.pieces import Section, environment, text
from qurve.study.page.plots import PLOTS
from qurve.study.page.sections import SECTIONS
from qurve.study.results import Arm, StudyResults
from qurve.study.statistics import Comparison, comparisons, is_alarm, overall_verdict, scope

MOST_CARDS = 12
"""Arms with a card each; of more, those without a verdict are folded away."""


def page(results: StudyResults, more: Sequence[Section] = ()) -> str:
    """`report.html`; the sections of `more` come after the first that the page has of its own.

    A study of maps is read by its maps: they stand first, and what there is arm by arm is folded away.
    """
    from markupsafe import Markup

    of_maps = has_maps(results) and len(results.arms) > MOST_CARDS
    own, others = (
        [(s, html) for s in group if (html := s.fragment(results)) is not None] for group in (SECTIONS, more)
    )
    fragments = [(s.title, html, of_maps and s.by_arm) for s, html in (*own[:1], *others, *own[1:])]
    pairs = comparisons(results)
    top = headline(results)
    colour = 0 if top is None or top.arm is None else colour_index(results, top.arm)
    cards = [_card(results, arm, pair) for arm, pair in zip(results.others, pairs, strict=True)]
    own_cards = [card for card in cards if card["arm"].matched is None]
    folded = [card for card in own_cards if of_maps or (len(own_cards) > MOST_CARDS and card["pair"].outcome == "none")]
    return (
        environment()
        .get_template("page.html")
        .render(
            results=results,
            css=Markup(text("page.css")),
            scripts=[script(source) for source in (plotly(), text("page.js"))],
            plots={name: Markup(safe_json(PLOTS[name](results))) for name in figures_of(results) if name in PLOTS},
            sections=[{"title": title, "fragment": Markup(html), "folded": fold} for title, html, fold in fragments],
            verdict=overall_verdict(results),
            alarms=alarms(results),
            headline=None if top is None else {**vars(top), "colour": colour},
            scope=scope(results, pairs),
            cards=[card for card in own_cards if card not in folded],
            folded=folded,
            matched=[card for card in cards if card["arm"].matched is not None],
            doubts=reservations(results),
            progress=f"{sum(run.finished for run in results.runs)} of {len(results.runs)}",
        )
    )


def _card(results: StudyResults, arm: Arm, pair: Comparison) -> dict[str, Any]:
    word = {"lower": "lower loss", "higher": "higher loss", "noise": "not told apart", "none": "no verdict"}
    said = "false alarm" if arm.seed_offset and is_alarm(pair) else word[pair.outcome]
    return {"arm": arm, "pair": pair, "word": said, "colour": colour_index(results, arm)}


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
