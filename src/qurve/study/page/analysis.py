"""What one command of `qurve analyze` found in a trained model, as a page: sentences, figures, then the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qurve.study.page.build import plotly, safe_json, script
from qurve.study.page.pieces import environment, in_table, text
from qurve.study.worth import Table


def analysis_page(
    command: str,
    title: str,
    words: Sequence[str],
    figures: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    plots: Mapping[str, Any] | None = None,
) -> str:
    """One HTML file. `figures` are headings with the HTML below them; `plots` are living figures (see `plots`) by the
    name of the still one whose place they take: without any, the page has no script."""
    from markupsafe import Markup

    numbers = "".join(in_table(f"table-{place}", table) for place, table in enumerate(tables))
    sources = (plotly(), text("page.js")) if plots else ()
    return (
        environment()
        .get_template("analysis.html")
        .render(
            results={"title": title},
            command=command,
            words=words,
            css=Markup(text("page.css")),
            scripts=[script(source) for source in sources],
            plots=[(name, Markup(safe_json(plot))) for name, plot in (plots or {}).items()],
            sections=[
                {"title": name, "fragment": Markup(html), "folded": False}
                for name, html in (*figures, ("In numbers", numbers))
            ],
        )
    )
