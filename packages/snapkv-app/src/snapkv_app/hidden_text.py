"""Remove the text that a page or a document does not show, because it could instruct a model."""

import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

from snapkv_app.decoding import refused

_MOST_UNPACKED = 2**26
"""The most bytes of markup that the parts of an archive may have together."""

# Web pages.

_NEVER_SHOWN = (
    "//*[@hidden or self::template or self::noscript or self::datalist or self::annotation "
    "or self::annotation-xml or re:test(@style, "
    r"'display\s*:\s*none|visibility\s*:\s*(hidden|collapse)|"
    r"(opacity|font-size)\s*:\s*0[^.\d]*(;|$)', 'i')]"
)
_REGULAR_EXPRESSIONS = "http://exslt.org/regular-expressions"

# Every pattern stops at a character that it begins with, so that no sheet is searched twice.
_LEFT_OUT = re.compile(
    r"/\*.*?(?:\*/|\Z)|@media(?!\s*(?:all|screen)\s*\{)[^{}@]*\{(?:[^{}]*\{[^{}]*\})*", re.S
)
"""Comments of a style sheet, and rules for printers or for windows of some sizes."""
_SELECTOR = re.compile(r"[\w-]*(?:[.#][\w-]+)*")
_DECLARATION = re.compile(r"\b(display|visibility|opacity|font-size)\s*:\s*([^;!]+)(!?)")
_HIDING = re.compile(r"none|hidden|collapse|0(?![.\d])")


def remove_hidden_elements(page: Any) -> bool:
    """Remove the elements that a browser would not show; changes `page` in place.

    Returns:
        Whether a style sheet of the page hides an element that was removed.
    """
    hidden = set(page.xpath(_NEVER_SHOWN, namespaces={"re": _REGULAR_EXPRESSIONS}))
    by_sheet = _hidden_by_sheet(page)
    for element in hidden | by_sheet:
        if element.getparent() is not None:
            element.drop_tree()
    return bool(by_sheet - hidden)


def _hidden_by_sheet(page: Any) -> set[Any]:
    """Return the elements that the `<style>` elements of a page hide.

    Only selectors of one tag, classes and an id are compared. Rules for the whole page are left
    out, because programs use them to hide a page until it is loaded.
    """
    elements = defaultdict[str, set[Any]](set)
    for element in page.iter("*"):
        classes = (f".{name}" for name in element.get("class", "").split())
        for key in (element.tag, f"#{element.get('id')}", *classes):
            elements[key].add(element)
    sheet = _LEFT_OUT.sub("", "\n".join(style.text or "" for style in elements["style"]))
    hidden = defaultdict[str, set[Any]](set)
    for keys, kind, is_hiding in _rules(sheet):
        chosen = set.intersection(*(elements[key] for key in keys))
        chosen = {element for element in chosen if kind not in element.get("style", "").lower()}
        hidden[kind] = hidden[kind] | chosen if is_hiding else hidden[kind] - chosen
    return set().union(*hidden.values()) - elements["html"] - elements["body"] - elements["head"]


def _rules(sheet: str) -> list[tuple[list[str], str, bool]]:
    """Return the rules of a style sheet that hide or show elements, the strongest last.

    Returns:
        For each rule the tag, classes and id that it needs, a property, and whether it hides.
    """
    found = []
    for block in sheet.split("}"):
        before, _, declarations = block.rpartition("{")
        selectors = before.rpartition("{")[2].split(",")
        for selector in filter(_SELECTOR.fullmatch, map(str.strip, selectors)):
            keys = re.findall(r"^[\w-]+|[.#][\w-]+", selector)
            strength = (selector.count("#"), selector.count("."), len(keys))
            for kind, value, is_important in _DECLARATION.findall(declarations.lower()):
                rule = keys, kind, bool(_HIDING.match(value))
                found.append(((is_important, strength), rule))
    return [rule for _, rule in sorted(found, key=lambda pair: pair[0]) if rule[0]]


# Files of Office programs.

_TEXT_PARTS = re.compile(r"(?:word/.+|content|styles)\.xml")
_SHEETS_AND_SLIDES = re.compile(
    r"xl/(?:workbook|worksheets/.+)\.xml|ppt/slides/.+\.xml|content\.xml"
)
_FOLDED = re.compile(
    rb"""<(?:\w+:)?(?:row|col|sheet|sld)\b[^<>]*\s(?:hidden=["'](?:1|true)|show=["'](?:0|false)|"""
    rb"""state=["'](?:hidden|veryHidden))|table:visibility=["'](?:collapse|filter)|"""
    rb"""table:display=["']false|presentation:visibility=["']hidden"""
)
_COMMENTS = re.compile(r"(?:xl|ppt)/comments?.*\.xml")
"""The comments of workbooks and slides, which xberg does not read."""
_NOT_COMPUTED = re.compile(
    rb"""<(?:\w+:)?c\b(?![^<>]*\st=["']str["'])[^<>]*>\s*<(?:\w+:)?f\b(?:[^<>]*/|[^<>]*>[^<>]*</(?:\w+:)?f)>"""
    rb"""\s*(?:<(?:\w+:)?v\s*/>|<(?:\w+:)?v>\s*</|</)|"""
    rb"""<table:table-cell\b(?=[^<>]*\stable:formula=)(?![^<>]*\soffice:value-type=)"""
)
"""Cells with a formula and no result; Excel stores an empty text as a result of the type str."""


def remove_hidden_text(name: str, data: bytes) -> tuple[bytes, list[str]]:
    """Remove the hidden text of a Word or OpenDocument file, and find what a workbook leaves out.

    Args:
        name: the name of the file, for error messages.
        data: the content of the file; any file of an Office program.

    Returns:
        The content without hidden text, and a clause for each kind of hidden or missing content.

    Raises:
        DocumentError: the parts with text have too many bytes when they are unpacked.
    """
    if data.startswith(b"{\\rtf") and re.search(rb"\\v(?:1|(?![a-z0-9-]))", data):
        return data, ["it has hidden text, which was read with the rest"]
    if not zipfile.is_zipfile(BytesIO(data)):
        return data, []
    from lxml import etree

    parser = etree.XMLParser(resolve_entities=False)
    copy, losses = BytesIO(data), []
    with zipfile.ZipFile(copy, "a") as archive:
        names = archive.namelist()
        sheets = unpack(name, archive, [*filter(_SHEETS_AND_SLIDES.fullmatch, names)])
        if any(map(_COMMENTS.fullmatch, names)) or any(map(_is_annotated, sheets)):
            losses.append("it has comments, which are not read")
        if any(map(_NOT_COMPUTED.search, sheets)):
            losses.append("it has formulas without stored results, which are not read")
        if any(map(_FOLDED.search, sheets)):
            losses.append("it has hidden sheets, rows, columns or slides, which were read")
        places = [*filter(_TEXT_PARTS.fullmatch, names)]
        roots = [etree.fromstring(part, parser) for part in unpack(name, archive, places)]
        hidden = [*_hidden_runs(roots), *_hidden_in_open_document(roots)]
        moved = [run for root in roots for run in root.iter("{*}moveFrom")]  # read at its new place
        for element in hidden + moved:
            element.clear(keep_tail=True)
        if hidden:
            losses.append("it has hidden text, which is not read")
        for place, root in zip(places, roots, strict=True) if hidden or moved else ():
            archive.filelist.remove(archive.NameToInfo.pop(place))  # or it would be there twice
            archive.writestr(place, etree.tostring(root))
    return copy.getvalue(), losses


def _is_annotated(content: bytes) -> bool:
    """Return whether the content of an OpenDocument workbook or presentation has comments."""
    is_text = b"<office:spreadsheet" not in content and b"<office:presentation" not in content
    return b"<office:annotation" in content and not is_text


def unpack(name: str, archive: zipfile.ZipFile, places: Sequence[str]) -> list[bytes]:
    """Read parts of an archive; no part is read beyond the size that the archive declares for it.

    Args:
        name: the name of the file, for error messages.
        archive: the file.
        places: the names of the parts.

    Raises:
        DocumentError: the parts have too many bytes together.
    """
    if sum(archive.getinfo(place).file_size for place in places) > _MOST_UNPACKED:
        raise refused(
            f"expected at most {_MOST_UNPACKED >> 20} MiB of markup, but got more in {name}",
            "Export it as text or PDF, or use a part of it",
        )
    return [archive.read(place) for place in places]


def _attribute(element: Any, name: str) -> str:
    """Return an attribute of an element in any namespace; empty without element or attribute."""
    values = () if element is None else element.items()
    return next((value for key, value in values if key.rpartition("}")[2] == name), "")


def _hidden_styles(
    styles: dict[str, Any],
    says: Callable[[Any], bool | None],
    parent: Callable[[Any], str],
) -> set[str]:
    """Return the names of the styles that hide text.

    Args:
        styles: the styles by their names.
        says: returns whether a style itself hides text; None if it does not say.
        parent: returns the name of the style on which a style is based.
    """
    hidden = set()
    for name, style in styles.items():
        for _ in range(64):  # styles may be based on each other in a circle
            if style is None or says(style) is not None:
                break
            style = styles.get(parent(style))
        if style is not None and says(style):
            hidden.add(name)
    return hidden


def _vanishes(owner: Any) -> bool | None:
    """Return whether a run or a style of Word hides text itself; None if it does not say."""
    vanish = owner.find("{*}rPr/{*}vanish")
    return None if vanish is None else _attribute(vanish, "val") not in ("0", "false", "off")


def _hidden_runs(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield the runs of Word, and the drawings, that are hidden or have a hidden style."""
    found = [style for root in roots for style in root.iter("{*}style")]
    styles = {_attribute(style, "styleId"): style for style in found}
    hidden = _hidden_styles(
        styles, _vanishes, lambda style: _attribute(style.find("{*}basedOn"), "val")
    )
    usual = [
        name
        for name, style in styles.items()
        if _attribute(style, "type") == "paragraph"
        and _attribute(style, "default") in ("1", "true")
    ]
    for root in roots:
        for run in root.iter("{*}r"):
            paragraph = next(run.iterancestors("{*}p"), run)
            table = next(run.iterancestors("{*}tbl"), run)
            of_paragraph = _attribute(paragraph.find("{*}pPr/{*}pStyle"), "val")
            names = {
                of_paragraph or "".join(usual[:1]),
                _attribute(run.find("{*}rPr/{*}rStyle"), "val"),
                _attribute(table.find("{*}tblPr/{*}tblStyle"), "val"),
            }
            own = _vanishes(run)
            if own or (own is None and names & hidden):
                yield run
        for drawing in root.iter("{*}drawing"):
            about = next(drawing.iter("{*}docPr"), None)
            if _attribute(about, "hidden") in ("1", "true"):
                yield drawing


def _hidden_in_open_document(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield the paragraphs, spans, sections and fields of OpenDocument that are hidden."""
    found = [style for root in roots for style in root.iter("{*}style")]
    styles = {_attribute(style, "name"): style for style in found}

    def says(style: Any) -> bool | None:
        display = _attribute(style.find("{*}text-properties"), "display")
        return display != "true" if display else None

    hidden = _hidden_styles(styles, says, lambda style: _attribute(style, "parent-style-name"))
    for root in roots:
        for element in root.iter("{*}p", "{*}h", "{*}span"):
            if _attribute(element, "style-name") in hidden:
                yield element
        for section in root.iter("{*}section"):
            if _attribute(section, "display") in ("none", "condition"):
                yield section
        for field in root.iter("{*}hidden-text", "{*}hidden-paragraph"):
            if _attribute(field, "is-hidden") != "false":
                is_paragraph = field.tag.endswith("hidden-paragraph")
                yield next(field.iterancestors("{*}p", "{*}h"), field) if is_paragraph else field
