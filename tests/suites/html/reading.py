"""A page read back as a browser reads it, as far as tests look at it."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}


@dataclass
class Element:
    """An element of the page."""

    name: str
    attributes: dict[str, str]
    parent: "Element | None" = None
    children: list["Element | str"] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def all(self, name: str, **wanted: str) -> list["Element"]:
        """Elements below with this name, in their order; ``cls`` is a class that they must have."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.name == name and set(wanted.values()) <= set(child.attributes.get("class", "").split()):
                    found.append(child)
                found += child.all(name, **wanted)
        return found

    def everything(self) -> list["Element"]:
        return [one for child in self.children if isinstance(child, Element) for one in (child, *child.everything())]

    def cells(self) -> list[list[str]]:
        """Texts of a table's body."""
        (body,) = self.all("tbody")
        return [[cell.text for cell in row.all("td")] for row in body.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.at = self.root

    def handle_starttag(self, tag, attrs):
        element = Element(tag, {name: value or "" for name, value in attrs}, self.at)
        self.at.children.append(element)
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag, attrs):
        self.at.children.append(Element(tag, {name: value or "" for name, value in attrs}, self.at))

    def handle_endtag(self, tag):
        assert self.at.name == tag, f"</{tag}> closes <{self.at.name}>"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)


def read(page: str, written: bool = True) -> Element:
    """The root of the page.

    Args:
        page: Its text.
        written: Whether we wrote it: a browser drops the line break that begins a ``<pre>``, and has done so in what it gives back.
    """
    reader = _Reader()
    reader.feed(re.sub("(<pre[^>]*>)\n", r"\1", page) if written else page)
    reader.close()
    assert reader.at is reader.root
    return reader.root
