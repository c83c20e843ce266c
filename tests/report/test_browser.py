"""Every page in a real browser: no complaint, nothing wider than the window, all of it by keyboard, at every size."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from report_documents import DOCUMENTS, audit_document

from megatoken.analysis.comparison import compare
from megatoken.audit import read_evidence as read
from megatoken.claims.references import comparison_entry
from megatoken.planning.commands import Common, FleetFlags, Rate, buy
from megatoken.report import save_document, write_report
from megatoken.report.blocks import Table, View, section
from megatoken.report.curves import line_chart
from megatoken.report.page import page
from megatoken.report.plots import Line
from run_folders import run_folder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
CLAIMS = Path(__file__).parents[2] / "examples" / "claims" / "vendor-blog.yaml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium on this machine (Debian: apt-get install chromium)"),
]
QUIET_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
SIZES = {"desktop": (1280, 900), "tablet": (768, 1024), "phone": (360, 740)}
WIDTHS = (320, 390, 600, 641, 700, 820, 991, 993, 1024, 1920)
PAGES = [*DOCUMENTS, "run", "rack", "events"]


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET_FLAGS)
        yield started
        started.close()


@pytest.fixture
def address(tmp_path, make_run, make_rack):
    """Makes the page of that name and says where it is."""

    def make(name: str) -> str:
        if name in DOCUMENTS:
            return save_document(DOCUMENTS[name](), tmp_path / "out")[1].as_uri()
        if name == "events":
            lost = [
                {"node": f"node-{n}", "replica": None, "cause": "kill", "at_seconds": 4.0 + n / 4} for n in range(5)
            ]
            served = {"replicas": 2, "replicas_least": 1, "replicas_at_end": 2, "share_left": 0.5, "late_answers": 0}
            rack = {**served, "lost": lost, "joined": [], "clock_offsets": []}
            limits = {"ttft_limit_seconds": 18.0, "tpot_limit_seconds": 0.022}
            return write_report(make_run(scenario="server", rack=rack, **limits)).as_uri()
        return write_report(make_run() if name == "run" else make_rack(6)).as_uri()

    return make


@pytest.fixture
def visit(browser):
    """Opens an address in a fresh tab of a size and colour scheme; the test fails if the page complains."""
    complaints: list[str] = []
    tabs = []

    def open_tab(address: str, size: str = "desktop", scheme: str = "light"):
        width, height = SIZES[size]
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.append(request.url) if request.url != address else None)
        tab.goto(address)
        tabs.append(tab)
        return tab

    yield open_tab
    for tab in tabs:
        tab.close()
    assert complaints == []


def wider_than_the_window(tab) -> list[tuple[int, int]]:
    """Widths at which a page would have to be pushed sideways, and how wide it is there."""
    found = []
    for width in WIDTHS:
        tab.set_viewport_size({"width": width, "height": 900})
        page_width = tab.evaluate("document.documentElement.scrollWidth")
        column = "document.querySelector('main').getBoundingClientRect().right"
        parts = "[...document.querySelectorAll('main > section > *')].map(e => e.getBoundingClientRect().right)"
        if page_width > width or tab.evaluate(f"Math.max(...{parts}) > {column} + 1"):
            found.append((width, page_width))
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_every_window_in_light_and_dark(name, address, visit):
    tab = visit(address(name))
    shots = set()
    for width, height in SIZES.values():
        tab.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("[...document.querySelectorAll('svg text')].every(t => t.getBBox().width < 380)")
            small = (
                "[...document.querySelectorAll('main *')].filter(e => e.childElementCount == 0 && e.textContent.trim())"
            )
            sizes = f"{small}.filter(e => !e.ownerSVGElement).map(e => parseFloat(getComputedStyle(e).fontSize))"
            assert min(tab.evaluate(sizes)) >= 11
            if (width, height) == SIZES["phone"]:
                shots.add(tab.screenshot())
    assert len(shots) == 2
    assert wider_than_the_window(tab) == []


def test_latencies_of_microseconds_next_to_hours_are_not_cut_on_a_desktop(visit, make_run):
    run = make_run(scenario="server")
    result = json.loads((run / "result.json").read_text())
    for name, seconds in (("latency_seconds", 2328.1234), ("send_lag_seconds", 0.0000412)):
        result[name] = result["latency_seconds"] | dict.fromkeys(("p50", "p90", "p95", "p99"), seconds)
    (run / "result.json").write_text(json.dumps(result))
    tab = visit(write_report(run).as_uri())
    wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    assert tab.evaluate(f"{wide}.map(e => e.querySelector('caption').textContent)") == []


def test_no_percentile_of_a_run_is_out_of_sight_on_a_phone(visit, make_run):
    tab = visit(write_report(make_run(scenario="server")).as_uri(), "phone")
    wide = (
        "[...document.querySelectorAll('.scroll')].filter(e => !e.closest('details') && e.scrollWidth > e.clientWidth)"
    )
    assert tab.evaluate(f"{wide}.map(e => e.querySelector('caption').textContent)") == []
    percentiles = tab.locator("table", has=tab.locator("caption", has_text="Percentiles")).first
    right = percentiles.locator("td.number").last.bounding_box()
    assert right["x"] + right["width"] <= SIZES["phone"][0]
    assert "Formats." not in tab.locator("main").inner_text()


def test_the_unit_of_a_buyers_answer_is_seen_on_a_phone(visit, tmp_path):
    plan = buy(Rate(accelerator="GB300"), Common(profile=("rag",)), FleetFlags(), seats=5000)
    tab = visit(save_document(plan.to_document(), tmp_path)[1].as_uri(), "phone")
    results = tab.locator("table", has=tab.locator("caption", has_text="Results")).first
    assert results.evaluate("e => e.parentElement.scrollWidth <= e.parentElement.clientWidth")


def test_many_results_side_by_side_fit(visit, tmp_path):
    references = ("5.1-0008", "5.1-0016", "5.1-0061", "5.1-0098", "5.1-0072:llama3.1-405b:Offline")
    entries = [comparison_entry(name, read, benchmark="llama2-70b-99", scenario="Offline") for name in references]
    claimed = comparison_entry(f"{CLAIMS}#total", read, benchmark="llama2-70b-99", scenario="Offline")
    _, page = save_document(compare([*entries, claimed]).to_document(), tmp_path)
    tab = visit(page.as_uri())
    assert wider_than_the_window(tab) == []
    frame = tab.locator(".scroll", has=tab.locator("caption", has_text="Compared results"))
    tab.set_viewport_size({"width": 1280, "height": 900})
    frame.focus()
    assert tab.evaluate("document.activeElement.getAttribute('role')") == "region"


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("name", ["audit", "comparison", "plan_cost", "rack", "events"])
def test_letters_of_charts_stay_inside_and_apart(name, size, address, visit):
    tab = visit(address(name), size)
    overlaps = tab.evaluate(
        """() => [...document.querySelectorAll('main figure')].flatMap(figure => {
            const canvas = figure.querySelector('svg').getBoundingClientRect();
            const texts = [...figure.querySelectorAll('svg text')].filter(t => t.textContent);
            const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
            const outside = boxes.filter(([, b]) => b.left < canvas.left - 2 || b.right > canvas.right + 2);
            const touching = boxes.flatMap(([name, a], i) => boxes.slice(i + 1).filter(([, b]) =>
                Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2 &&
                Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => name + ' / ' + other));
            return [...outside.map(([name]) => name), ...touching];
        })"""
    )
    assert overlaps == []


def shown_findings(tab) -> list[str]:
    return tab.locator("tbody tr[class^='is-']:visible th").all_inner_texts()


def test_findings_are_chosen_with_the_mouse(address, visit):
    tab = visit(address("audit"))
    severities = ["✕ fail", "! warn", "? unknown", "note"]
    answers = ["✕ does not hold", "? cannot be determined", "✓ holds"]
    assert shown_findings(tab) == [*answers, *severities]
    tab.get_by_label("pass").check()
    assert shown_findings(tab) == [*answers, *severities, "✓ pass", "✓ pass"]
    tab.get_by_label("warn").uncheck()
    tab.locator("label", has_text="fail").click()
    assert shown_findings(tab) == [*answers, "? unknown", "note", "✓ pass", "✓ pass"]
    tab.get_by_label("cannot be determined").uncheck()
    assert shown_findings(tab)[:2] == ["✕ does not hold", "✓ holds"]


def test_findings_are_chosen_with_the_keyboard_alone(address, visit):
    tab = visit(address("audit"))
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.className") == "show-pass":
            break
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline not in ("none", "")
    tab.keyboard.press("Space")
    assert shown_findings(tab)[-2:] == ["✓ pass", "✓ pass"]
    tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Space")
    assert "note" not in shown_findings(tab)
    count = tab.evaluate("getComputedStyle(document.querySelectorAll('.count')[1], '::before').content")
    assert "counter" in count


def test_what_is_folded_opens_by_keyboard_and_sections_are_links(address, visit):
    tab = visit(address("audit"))
    tab.locator("nav a", has_text="Findings").focus()
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#findings")
    numbers = tab.locator("figure summary").first
    table = tab.locator("figure details table").first
    assert not table.is_visible()
    numbers.focus()
    tab.keyboard.press("Enter")
    assert table.is_visible()


def test_wide_tables_scroll_inside_their_frame_by_keyboard(address, visit):
    tab = visit(address("aggregate"), "phone")
    frame = tab.locator(".scroll", has=tab.locator("caption", has_text=re.compile("^Nodes$")))
    frame.focus()
    for _ in range(5):
        tab.keyboard.press("ArrowRight")
    tab.wait_for_timeout(300)
    assert frame.evaluate("element => element.scrollLeft") > 0
    assert tab.evaluate("window.scrollX") == 0


def test_a_screen_reader_finds_tables_charts_and_regions_by_name(address, visit):
    tab = visit(address("audit"), "phone")  # where the findings are laid out as blocks
    tree = tab.locator("body").aria_snapshot()
    for part in (
        'heading "Audit of azure_gb300_1m" [level=1]',
        'navigation "Sections"',
        'table "Findings"',
        'group "Show"',
        'checkbox "fail 1" [checked]',
        'checkbox "pass 2"\n',
        'rowheader "unknown"',
        'columnheader "Severity"',
        "img",
        'region "Findings"',
    ):
        assert part in tree, part


def test_runs_are_sorted_by_mouse_and_keyboard(visit, tmp_path):
    for name, seconds in (("one", 9.0), ("two", 100.0), ("three", 20.0)):
        run_folder(tmp_path / "runs", name, "host", f"2026-11-20T09:00:0{len(name)}Z", seconds=seconds)
    tab = visit(write_report(tmp_path / "runs").as_uri())
    table = tab.locator("table", has=tab.locator("caption", has_text=re.compile("^Runs$")))
    rate = table.get_by_role("button", name="Rate")
    rate.click()
    assert table.locator("tbody th").all_inner_texts() == ["two", "three", "one"]
    rate.focus()
    tab.keyboard.press("Enter")
    assert table.locator("tbody th").all_inner_texts() == ["one", "three", "two"]
    assert "descending" in table.locator("thead th[aria-sort]").get_attribute("aria-sort")
    table.get_by_role("button", name="Run", exact=True).click()
    assert table.locator("tbody th").all_inner_texts() == ["one", "three", "two"]
    assert wider_than_the_window(tab) == []


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_hovering_shows_the_values_of_every_panel_and_what_happened(visit, make_run, size):
    lost = {"node": "node-3", "replica": None, "cause": "kill", "at_seconds": 10.0}
    served = {"replicas": 2, "replicas_least": 1, "replicas_at_end": 2, "share_left": 0.5, "late_answers": 0}
    rack = {**served, "lost": [lost], "joined": [], "clock_offsets": []}
    tab = visit(write_report(make_run(scenario="server", rack=rack)).as_uri(), size)
    chart = tab.locator("figure").first
    tip, svg = chart.locator(".tip"), chart.locator("svg")
    assert not tip.is_visible()
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    at = chart.locator("line.event").first.bounding_box()
    tab.mouse.move(at["x"] + at["width"] / 2, box["y"] + box["height"] / 3)
    shown = tip.inner_text().splitlines()
    assert shown[0].startswith(("10 ", "9.9", "10.0")) and shown[0].endswith("seconds since the start")
    values = dict(line.split(": ", 1) for line in shown[1:-1])
    assert float(values["output tokens each second"].split()[0]) == pytest.approx(104, rel=0.01)
    latencies = ("Time to first token", "Time per output token")
    groups = {f"{one}, {which} of a group" for one in latencies for which in ("median", "highest")}
    assert set(values) == {"output tokens each second", *groups}
    assert shown[-1] == "node-3 lost at 10.0 s"
    place = tip.bounding_box()
    assert place["x"] >= 0 and place["x"] + place["width"] <= SIZES[size][0]
    tab.mouse.move(5, 5)
    assert not tip.is_visible()


def test_hovering_over_points_shows_the_nearest(visit, tmp_path):
    line = Line("p99", np.array([1.0, 2.0, 3.0]), np.array([10.0, 40.0, 20.0]))
    chart = line_chart("Latency", "ms", "tokens/s", [line], Table("t", (), ()), x_range=(0.0, 3.0), dots=True)
    place = tmp_path / "page.html"
    place.write_text(page(View("v", "", (), (section("s", chart),))))
    tab = visit(place.as_uri())
    point = tab.locator("circle.point0").nth(1)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    tab.mouse.move(box["x"] + 9, box["y"] + 9)
    assert tab.locator(".tip").inner_text().splitlines() == ["2 tokens/s", "p99: 40 ms"]


def test_paper_has_every_section_no_folded_numbers_and_black_letters(address, visit, tmp_path):
    tab = visit(address("rack"), scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.locator("nav").is_visible()
    assert not tab.locator("figure details").first.is_visible()
    assert tab.locator("details.facts table").first.is_visible()
    paper = Path(tmp_path / "page.pdf")
    tab.pdf(path=paper, format="A4")
    assert paper.stat().st_size > 10_000


def test_a_large_audit_stays_below_a_megabyte_and_opens(visit, tmp_path):
    document = audit_document()
    document["findings"] = [
        finding
        | {
            "id": f"{finding['id']}-{n}",
            "where": [{"file": f"a/long/path/to/log_{i}.txt", "line": i} for i in range(20)],
        }
        for n in range(200)
        for finding in document["findings"][-3:]
    ]
    document["artefacts"] *= 100
    _, report = save_document(document, tmp_path)
    assert report.stat().st_size < 2**20
    visit(report.as_uri())
