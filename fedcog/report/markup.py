"""Small pieces of HTML: escaped text, figures and tables; numbers and lists as text."""

import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources

NO_VALUE = "\N{EN DASH}"


def printable(text: str) -> str:
    """Replace every character that a page cannot show by a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def text(value: object) -> str:
    """Convert a value to text, and escape it for HTML."""
    return html.escape(printable(str(value)))


def join_words(values: Iterable[object]) -> str:
    """Join different values to a list such as "1, 2 and 3"."""
    words = list(dict.fromkeys(str(value) for value in values))
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def format_seconds(seconds: float) -> str:
    """Format seconds with two digits; from 10 on without decimals."""
    return f"{seconds:.2g}" if 0.001 <= seconds < 10 else f"{seconds:.0f}"


def document(title: str, body: str, script: str = "") -> str:
    """Build a page that loads nothing else.

    Args:
        title: Title and first heading, as plain text.
        body: The rest of the page, as HTML.
        script: JavaScript to run at the end.

    Returns:
        The page.
    """
    style = resources.files("fedcog.report").joinpath("style.css").read_text(encoding="utf-8")
    script_element = f"<script>{script}</script>" if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title>'
        f"<style>\n{style}</style></head>\n"
        f"<body><main><h1>{text(title)}</h1>{body}</main>{script_element}</body></html>\n"
    )


def figure(svg: str, caption: str, more: str = "") -> str:
    """Build a figure.

    Args:
        svg: The drawing.
        caption: The caption, as plain text.
        more: HTML below the caption.

    Returns:
        HTML.
    """
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption>{more}</figure>"


def table(head: str, rows: str) -> str:
    """Build a table that scrolls horizontally on a narrow page.

    Args:
        head: The cells of the header, as HTML; "" for none.
        rows: The rows, as HTML.

    Returns:
        HTML.
    """
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{header}<tbody>{rows}</tbody></table></div>'


def line_sample(color: str, dashes: Sequence[float]) -> str:
    """Draw a short sample of a line, for the label of a group.

    Args:
        color: Color of the line.
        dashes: Lengths of dashes and gaps; empty: a solid line.

    Returns:
        An SVG.
    """
    pattern = ""
    if dashes:
        lengths = " ".join(f"{2.5 * dash:g}" for dash in dashes)
        pattern = f' stroke-dasharray="{lengths}"'
    line = f'<line x1="0" y1="5" x2="28" y2="5" stroke="{color}" stroke-width="2.5"{pattern}/>'
    return f'<svg class="key" width="28" height="10" aria-hidden="true">{line}</svg>'


def with_unique_ids(svg: str, number: int) -> str:
    """Prefix all ids of an SVG, because matplotlib uses the same ids in every figure.

    Args:
        svg: The figure.
        number: Number of the figure on the page.

    Returns:
        The figure with changed ids and references.
    """
    return re.sub(
        "<[^>]*>",
        lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>figure{number}-", tag[0]),
        svg,
    )
