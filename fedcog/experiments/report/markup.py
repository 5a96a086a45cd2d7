"""Small pieces of HTML: escaped text, figures, tables, and numbers and lists in words."""

import html
import re
from collections.abc import Iterable, Sequence
from importlib import resources

NONE = "\N{EN DASH}"


def printable(text: str) -> str:
    """The same with a space for every character that no page can hold."""
    return "".join(character if character.isprintable() else " " for character in text)


def text(value: object) -> str:
    """Whatever it is, as text that cannot be taken for markup."""
    return html.escape(printable(str(value)))


def listed(values: Iterable[object]) -> str:
    """Each once, in a list such as 1, 2 and 3."""
    words = list(dict.fromkeys(str(value) for value in values))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def short(seconds: float) -> str:
    """Seconds in two figures, or whole from 10 on."""
    return f"{seconds:.2g}" if 0.001 <= seconds < 10 else f"{seconds:.0f}"


def document(title: str, body: str, script: str = "") -> str:
    """A page that is whole in itself, with its title as its first heading."""
    style = resources.files("fedcog.experiments.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title><style>\n{style}</style></head>\n'
        f"<body><main><h1>{text(title)}</h1>{body}</main>"
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def figure(svg: str, caption: str, more: str = "") -> str:
    """A drawing with words below it, and `more` below those."""
    return f"<figure>{svg}<figcaption>{text(caption)}</figcaption>{more}</figure>"


def table(head: str, rows: str) -> str:
    """A table that scrolls by itself where the page is narrow."""
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll" tabindex="0"><table>{header}<tbody>{rows}</tbody></table></div>'


def key(colour: str, dashes: Sequence[float]) -> str:
    """A group's line, as small as a letter."""
    pattern = f' stroke-dasharray="{" ".join(f"{2.5 * dash:g}" for dash in dashes)}"' if dashes else ""
    line = f'<line x1="0" y1="5" x2="28" y2="5" stroke="{colour}" stroke-width="2.5"{pattern}/>'
    return f'<svg class="key" width="28" height="10" aria-hidden="true">{line}</svg>'


def numbered(svg: str, number: int) -> str:
    """A figure with names of its own: matplotlib calls the parts of all figures the same."""
    return re.sub("<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>figure{number}-", tag[0]), svg)
