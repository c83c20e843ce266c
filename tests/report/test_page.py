"""Every page: well formed, self-contained, readable without eyes, harmless whatever a document holds."""

import base64
import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import LOADING_ATTRIBUTES, parsed, words
from report_documents import DOCUMENTS

from examples import examples
from megatoken.errors import UsageError
from megatoken.report.blocks import Column, Table
from megatoken.report.documents import KINDS, checked
from megatoken.report.page import page, rows_of, style_sheet
from megatoken.report.views import document_view, run_view
from megatoken.runs.run import read_run

PAGES = [*DOCUMENTS, "run", "rack"]
STYLE = style_sheet()
LIGHT, DARK = re.findall(r":root \{([^}]*--[^}]*)\}", STYLE)


@pytest.fixture(params=PAGES)
def html(request, make_run, make_rack) -> str:
    if request.param in DOCUMENTS:
        return page(document_view(checked(DOCUMENTS[request.param]())))
    return page(run_view(read_run(make_run() if request.param == "run" else make_rack(6))))


def test_points_of_numbers_stand_below_each_other():
    rows = tuple((cell,) for cell in ("7.857", "14", "1,299.5*", "-", "10.1"))
    padded = [row[0] for row in rows_of(Table("t", (Column("a", numeric=True),), rows))]
    shown = [cell.replace("\u2007", "_").replace("\u2008", ":") for cell in padded]
    assert shown == ["7.857_", "14:____", "1,299.5*__", "-", "10.1___"]


def test_a_page_loads_nothing(html):
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
    root = parsed(html)
    for element in root.iter():
        assert element.tag not in {"img", "iframe", "object", "embed", "video", "audio", "base", "form"}
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert name not in LOADING_ATTRIBUTES or value == "data:," or value.startswith("#")
    (own,) = root.iter("script")  # without attributes, so it loads nothing
    assert own.attrib == {}
    digest = base64.b64encode(hashlib.sha256(own.text.encode()).digest()).decode()
    policy = root.find("head/meta[@http-equiv]").get("content")
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy
    assert len(html.encode()) < 200_000


def test_a_page_can_be_read_without_eyes(html):
    root = parsed(html)
    assert root.get("lang") == "en"
    assert words(root.find("head/title")).endswith("· megatoken")
    assert "width=device-width" in root.find("head/meta[@name='viewport']").get("content")
    assert len(root.findall(".//h1")) == len(root.findall(".//main")) == 1
    assert all(cell.get("scope") in {"row", "col"} for cell in root.iter("th"))
    assert all(words(table.find("caption")) for table in root.iter("table"))
    named = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(named) == len(set(named))
    identifiers = {element.get("id"): words(element) for element in root.iter() if element.get("id")}
    for element in root.iter():
        for label in element.get("aria-labelledby", "").split():
            assert identifiers[label]
    for link in root.iter("a"):
        assert link.get("href").removeprefix("#") in identifiers
    inputs = {field.get("id") for field in root.iter("input")}
    assert inputs == {label.get("for") for label in root.iter("label")}
    for field in root.iter("fieldset"):
        assert words(field.find("legend"))


def test_every_chart_has_words_and_its_numbers(html):
    for figure in parsed(html).iter("figure"):
        chart = figure.find("svg")
        assert chart.get("role") == "img"
        assert words(chart.find("desc"))
        assert len(figure.findall("details//tbody/tr")) >= 1
        width, height = map(float, chart.get("viewBox").split()[2:])
        assert width == (640 if figure.get("class") == "wide" else 400)
        for element in chart.iter():
            for name in ("x", "x1", "x2", "cx"):
                assert 0 <= float(element.get(name, 0)) <= width
            for name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(element.get(name, 0)) <= height
            for point in element.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height
            if element.tag == "rect":
                assert float(element.get("x")) + float(element.get("width")) <= width + 1


def luminance(colour: str) -> float:
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_letters_stand_out_from_paper_and_cards(palette):
    colours = dict(re.findall(r"--(\w+): (#\w{6})[;\w]", palette))
    for letters in ("ink", "quiet", "good", "bad", "warn", "plain", "first", "second", "third", "fourth"):
        for ground in ("paper", "card"):
            light, dark = sorted((luminance(colours[letters]), luminance(colours[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (letters, ground)


def test_the_style_sheet_closes_what_it_opens():
    assert STYLE.count("{") == STYLE.count("}")
    assert "<" not in STYLE and "&" not in STYLE  # it stands inside XML


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damaged_documents(draw):
    """A document in which values anywhere are replaced by whatever JSON can hold."""
    document = json.loads(json.dumps(DOCUMENTS[draw(st.sampled_from(list(DOCUMENTS)))]()))
    for _ in range(draw(st.integers(1, 4))):
        holder = document
        while True:
            keys = [key for key in holder if key not in ("kind", "schema_version")] if isinstance(holder, dict) else []
            choices = keys or (range(len(holder)) if isinstance(holder, list) else [])
            if not choices:
                break
            key = draw(st.sampled_from(choices))
            if not isinstance(holder[key], dict | list) or not holder[key] or draw(st.integers(0, 2)) == 0:
                holder[key] = draw(JSON)
                break
            holder = holder[key]
    return document


def complaint(document) -> str:
    """What is said about a document that has no page; nothing where it has one, which is well formed."""
    try:
        parsed(page(document_view(checked(document))))
    except UsageError as error:
        return str(error)
    return ""


@settings(deadline=None, max_examples=examples(300))
@given(damaged_documents())
def test_a_damaged_document_makes_a_page_or_an_error_of_one_line(document):
    assert len(complaint(document).splitlines()) <= 1


def test_a_key_that_breaks_lines_stays_in_its_line():
    document = json.loads(json.dumps(DOCUMENTS["repeats"]()))
    assert "not an object" in (said := complaint(document | {"metrics": {"a\u2028b\x1c\n": False}}))
    assert len(said.splitlines()) == 1


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KINDS), st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_a_document_of_anything_makes_a_page(kind, values):
    assert len(complaint({**values, "kind": kind, "schema_version": 1}).splitlines()) <= 1
