"""The page in a real browser: it renders, its figures live, the keyboard reaches everything, and it prints."""

from __future__ import annotations

import re
import time

import pytest
from fake_study import BASELINE, NONLINEAR, THREE_ARMS, arm, config, grid, record, searched, write_study
from test_report import FATES, MESSY

from qurve.study.report import write_report


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_report(write_study(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    return write_report(write_study(tmp_path_factory.mktemp("messy"), MESSY, fates=FATES, search=False))


@pytest.fixture
def opened(browser):
    """`opened(file, width=…, …)` -> the page; at the end, that it asked for nothing and complained of nothing."""
    contexts, complaints, requests, files = [], [], [], []

    def open_page(file, width=1280, script=True, **more):
        context = browser.new_context(viewport={"width": width, "height": 844}, java_script_enabled=script, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        files.append(file.as_uri())
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == files


def alive(page, name):
    """The figure, once its plot is drawn."""
    page.locator(f"#{name}").scroll_into_view_if_needed()
    page.locator(f"#{name} .live .main-svg").first.wait_for()
    return page.locator(f"#{name}")


def two_frames(page):
    """Wait until what was asked for has been painted."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def lines(page, name):
    """How many traces a figure shows."""
    return page.evaluate(
        "name => document.querySelector(`#${name} .live`)._fullData.filter((trace) => trace.visible === true).length",
        name,
    )


def ranges(page, name):
    return page.evaluate(
        "name => { const l = document.querySelector(`#${name} .live`)._fullLayout;"
        " return [...l.xaxis.range, ...l.yaxis.range].map(Number); }",
        name,
    )


@pytest.mark.slow
def test_figures_come_to_life_and_arms_can_be_hidden(opened, whole):
    page = opened(whole)
    figure = alive(page, "curves")
    assert not figure.locator(".still").is_visible()
    before = lines(page, "curves")
    button = figure.get_by_role("button", name="MLP 4.75")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert 0 < lines(page, "curves") < before
    button.click()
    assert lines(page, "curves") == before


@pytest.mark.slow
def test_arms_at_the_baselines_point_wait_for_their_button(opened, tmp_path):
    page = opened(write_report(write_study(tmp_path, searched(*THREE_ARMS), seeds=(1, 2))))
    figure, before = alive(page, "curves"), lines(page, "curves")
    group = figure.get_by_role("group", name="At the baseline's best point")
    assert [button.get_attribute("aria-pressed") for button in group.get_by_role("button").all()] == ["false"] * 2
    group.get_by_role("button").first.click()
    assert lines(page, "curves") > before


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_table_is_cut_without_a_sign(opened, whole, messy, width):
    """On a wide screen every table is whole; on a phone those of words stand row by row, and what is wider than the
    screen has a shadow where there is more."""
    for file in (whole, messy):
        page = opened(file, width)
        cut = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
            ".map((e) => [e.querySelector('table').id || e.ariaLabel, e.querySelector('table').className,"
            " getComputedStyle(e).backgroundImage])"
        )
        if width == 1280:
            assert cut == []
        assert all("stack" not in kind and "gradient" in image for _, kind, image in cut)


@pytest.mark.slow
def test_a_map_is_seen_at_once_and_the_arms_on_demand(opened, tmp_path):
    kinds = ("linear", "bottleneck", "identity", "fixed")
    arms = grid(*((f"kind-{place}", kind) for place, kind in enumerate(kinds)))
    page = opened(write_report(write_study(tmp_path, arms, seeds=(1,), search=False, steps=60)))
    assert page.locator("#map-1").bounding_box()["y"] < 1_200
    assert page.evaluate("document.documentElement.scrollHeight") < 8_000
    assert not page.locator("#summary").is_visible()
    page.locator("h2:text-is('Configurations and final loss') + details > summary").click()
    assert page.locator("#summary").is_visible()
    page.emulate_media(media="print")
    assert page.locator("#runs").is_visible(), "paper has no buttons"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_renders(opened, whole, messy, width, scheme):
    for file in (whole, messy):
        page = opened(file, width, color_scheme=scheme)
        for name in ("curves", "gains"):
            alive(page, name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.body.scrollWidth") <= width
        for element in ("#verdict", "#summary", "#curves", "#batches", "#changed", "#runs", "#provenance"):
            assert page.locator(element).is_visible(), element
        assert page.locator("#differences svg:visible").count() == 1
        plot = page.locator("#curves .main-svg").first.bounding_box()
        assert plot["width"] > 0.8 * min(width, 1000) - 40
        background, ink, axis, still = (
            sum(map(int, re.findall(r"\d+", page.evaluate(script))[:3])) / 3
            for script in (
                "getComputedStyle(document.body).backgroundColor",
                "getComputedStyle(document.body).color",
                "getComputedStyle(document.querySelector('#curves .xtick text')).fill",
                "getComputedStyle(document.querySelector('#differences svg text')).fill",
            )
        )
        if scheme == "dark":
            assert background < 60
            assert min(ink, axis, still) > 190
        else:
            assert background > 230
            assert max(ink, axis, still) < 60


@pytest.mark.slow
def test_layers_zoom_and_hover(opened, whole):
    page = opened(whole)
    figure = alive(page, "curves")
    before = lines(page, "curves")
    for name in ("Each seed", "Every training loss"):
        button = figure.get_by_role("button", name=name)
        assert button.get_attribute("aria-pressed") == "false"
        button.click()
        assert lines(page, "curves") > before
        before = lines(page, "curves")
    figure.get_by_role("button", name="hide all arms").click()
    assert lines(page, "curves") == 0
    figure.get_by_role("button", name="show all arms").click()
    assert lines(page, "curves") == before

    whole_range = ranges(page, "curves")
    figure.get_by_role("button", name="zoom in").click()
    closer = ranges(page, "curves")
    assert whole_range[0] < closer[0] < closer[1] < whole_range[1]
    assert closer[3] - closer[2] < whole_range[3] - whole_range[2]  # the heights follow
    figure.get_by_role("button", name="move right").click()
    assert ranges(page, "curves")[0] > closer[0]
    figure.get_by_role("button", name="reset the range").click()
    assert ranges(page, "curves") == whole_range

    plot = figure.locator(".live .nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.2 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.9 * box["height"], steps=4)
    page.mouse.up()
    assert ranges(page, "curves")[0] > whole_range[0]
    figure.get_by_role("button", name="reset the range").click()

    x, y = page.evaluate(
        "() => { const live = document.querySelector('#curves .live'), l = live._fullLayout;"
        " const t = live._fullData.find((t) => t.mode === 'lines+markers' && t.yaxis === 'y');"
        " const box = live.getBoundingClientRect(), i = t.x.length - 4;"
        " return [box.x + l.xaxis._offset + l.xaxis.d2p(t.x[i]), box.y + l.yaxis._offset + l.yaxis.d2p(t.y[i])]; }"
    )
    page.mouse.move(x - 3, y - 2)
    page.mouse.move(x, y)
    page.locator("#curves .hoverlayer .hovertext").first.wait_for()
    assert re.search(r"step 3\d\d", page.locator("#curves .hoverlayer").text_content())


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_panels_of_dynamics_are_zoomed_together(opened, tmp_path, width):
    write_study(tmp_path, (BASELINE, arm("new", "New")), seeds=(1, 2), search=False)
    for seed in (1, 2):
        record(tmp_path, "new", seed, {"key.norm": [1.0 + block for block in range(8)]}, every=20)
    page = opened(write_report(tmp_path), width)
    figure = alive(page, "dynamics-norms")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    panels = (
        "() => { const l = document.querySelector('#dynamics-norms .live')._fullLayout;"
        " return ['', 2, 3, 4, 5, 6].map((n) => [...l[`xaxis${n}`].range, ...l[`yaxis${n}`].range].map(Number)); }"
    )
    before = page.evaluate(panels)
    assert len({tuple(panel) for panel in before}) == 1
    figure.get_by_role("button", name="zoom in").click()
    closer = page.evaluate(panels)
    assert all(x == closer[0][:2] for *x, _, _ in closer)
    assert before[0][0] < closer[0][0] < closer[0][1] < before[0][1]
    assert [low for _, _, low, _ in closer] == sorted({low for _, _, low, _ in closer})  # each panel's own heights
    figure.get_by_role("button", name="reset the range").click()
    assert page.evaluate(panels) == before


@pytest.mark.slow
def test_the_keyboard_reaches_and_presses_every_button(opened, whole):
    page = opened(whole)
    wanted = page.locator(".tools button").count()
    assert wanted > 20
    reached = set()
    for _ in range(wanted + 60):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "() => { const e = document.activeElement;"
            " return e.matches('.tools button') ? [...document.querySelectorAll('.tools button')].indexOf(e) : -1; }"
        )
        reached.add(here)
        if here == 0:
            pressed = page.evaluate("document.activeElement.getAttribute('aria-pressed')")
            page.keyboard.press("Space")
            assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") != pressed
    assert reached - {-1} == set(range(wanted))
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, [role=img], [role=group], [role=region], [role=toolbar]')]"
        ".filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim())).length"
    )
    assert unnamed == 0


@pytest.mark.slow
def test_without_script_the_still_pictures_stay(opened, whole):
    page = opened(whole, script=False)
    for name in ("curves", "gains", "differences", "search"):
        assert page.locator(f"#{name} .still svg:visible").count() == 1
    assert page.locator(".tools").count() == 0


@pytest.mark.slow
def test_on_paper_the_pictures_are_still_and_dark(opened, whole):
    page = opened(whole, color_scheme="dark")
    alive(page, "curves")
    document = page.pdf(format="A4")
    assert document.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", document)) <= 12
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 1000})
    assert page.locator("#curves .still .wide svg").is_visible()
    assert not page.locator("#curves .live").is_visible()
    assert not page.locator("#curves .tools").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    assert page.locator("#summary thead").is_visible()
    ink = page.evaluate("getComputedStyle(document.querySelector('#curves .still svg text')).fill")
    assert max(map(int, re.findall(r"\d+", ink)[:3])) < 60


@pytest.mark.slow
def test_the_colours_follow_when_the_scheme_changes(opened, whole):
    page = opened(whole, color_scheme="light")
    alive(page, "curves")
    colour = "getComputedStyle(document.querySelector('#curves .xtick text')).fill"
    light = page.evaluate(colour)
    page.emulate_media(color_scheme="dark")
    two_frames(page)
    assert page.evaluate(colour) != light


@pytest.mark.slow
def test_a_figure_without_gains_can_be_zoomed_and_reset(opened, tmp_path):
    fates = {("res-gelu", seed): "diverged" for seed in (1, 2, 3)}
    page = opened(write_report(write_study(tmp_path, (BASELINE, NONLINEAR), fates=fates, search=False)))
    figure = alive(page, "curves")
    for name in ("zoom in", "reset the range"):
        figure.get_by_role("button", name=name, exact=True).click()
        two_frames(page)


@pytest.mark.slow
def test_two_hundred_long_runs_stay_fluid(opened, tmp_path):
    long = config(train__steps=600)
    arms = (
        {**BASELINE, "config": long},
        *(arm(f"arm-{i}", f"Arm {i}", i / 100, config=long) for i in range(1, 10)),
    )
    file = write_report(write_study(tmp_path, arms, seeds=tuple(range(20)), steps=600, every=1))
    assert file.stat().st_size < 12_000_000
    page = opened(file)
    figure = alive(page, "curves")
    for name in ("Each seed", "Every training loss", "Arm 3", "zoom in", "reset the range"):
        started = time.monotonic()
        figure.get_by_role("button", name=name, exact=True).click()
        two_frames(page)
        assert time.monotonic() - started < 3, name  # a third of a second here; ten times that on a busy machine
    assert page.locator("#runs tbody tr").count() == 200
