"""Reading pages as a strict reader would."""

from xml.etree import ElementTree

LOADING_ATTRIBUTES = {"src", "srcset", "href", "action", "data", "poster", "background"}


def parsed(html: str) -> ElementTree.Element:
    """The page as XML, which it must be after its first line."""
    start, _, rest = html.partition("\n")
    assert start == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


def words(element: ElementTree.Element) -> str:
    """All text of an element, its white space as one blank."""
    return " ".join("".join(element.itertext()).split())


def table_rows(root: ElementTree.Element, caption: str) -> dict[str, list[str]]:
    """The rows of the one table of that caption: first cell -> other cells."""
    (table,) = (t for t in root.iter("table") if t.find("caption") is not None and words(t.find("caption")) == caption)
    return {words(row.find("th")): [words(cell) for cell in row.findall("td")] for row in table.iter("tr")}
