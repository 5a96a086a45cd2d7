"""The page about an audit: tables, originals beside reconstructions, and how to read them."""

from collections.abc import Sequence

from torch import Tensor

from fedcog.report.audit.table import (
    ATTACK_COLUMNS,
    ATTACK_NOTE,
    MEMBERSHIP_COLUMNS,
    MEMBERSHIP_NOTE,
    attack_rows,
    membership_rows,
    used_columns,
)
from fedcog.report.image_section import image_element
from fedcog.report.markup import document, join_words, table, text
from fedcog.studies.audit.attacks import InversionAttack
from fedcog.studies.audit.audit import Audit

MAX_PICTURES = 8
"""Number of reconstructions that are shown of each attack, the best ones."""


def page(audit: Audit) -> str:
    """Build the page about an audit.

    Args:
        audit: The audit.

    Returns:
        A self-contained page in HTML.
    """
    about = audit.about
    title = f"What {about['algorithm']} on {about['dataset']} leaks"
    parts = [
        ("inversion", "Gradient inversion", _inversion(audit)),
        ("pictures", "Originals and what the attack finds", _pictures(audit)),
        ("membership", "Membership inference", _membership(audit)),
        ("notes", "How to read this", _notes(audit)),
        ("settings", "Settings", _settings(audit)),
    ]
    shown = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in shown)
    body = "".join(
        f'<section id="{name}"><h2>{heading}</h2>{content}</section>'
        for name, heading, content in shown
    )
    return document(title, f'{_summary(audit)}<nav aria-label="Contents">{links}</nav>{body}')


def _summary(audit: Audit) -> str:
    about = audit.about
    clients = join_words(about["clients"])
    return (
        f"<p>{text(about['algorithm'])} on {text(about['dataset'])}, seed {about['seed']}, after "
        f"round {about['round']} of {about['rounds']}; network {text(about['model'])}. In the next "
        f"round the server hears of clients {clients}; attacked is client "
        f"{audit.settings['client']}.</p>"
        f'<p class="warning">{text(audit.notes[-1])}</p>'
    )


def _inversion(audit: Audit) -> str:
    """The table of attacks, or why there are none."""
    if audit.inversion_note:
        return f"<p>Gradient inversion does not apply. {text(audit.inversion_note)}</p>"
    problems = dict.fromkeys(
        f"{attack.case}, {attack.target}: {attack.problem}"
        for attack in audit.attacks
        if attack.problem
    )
    warnings = "".join(f'<p class="warning">{text(problem)}</p>' for problem in problems)
    return (
        f"{_table(ATTACK_COLUMNS, attack_rows(audit), num_text_columns=2)}{warnings}"
        f'<p class="note">{text(ATTACK_NOTE)}</p>'
    )


def _pictures(audit: Audit) -> str:
    """Originals above reconstructions, for every attack on images."""
    figures = "".join(_figure(attack) for attack in audit.attacks if attack.pictures is not None)
    return f'<div class="figures">{figures}</div>' if figures else ""


def _figure(attack: InversionAttack) -> str:
    assert attack.pictures is not None
    originals, reconstructions = attack.pictures[:, :MAX_PICTURES]
    names = attack.classes[:MAX_PICTURES]
    what = "one client's update"
    if attack.target == "sum":
        what = f"the sum of {attack.num_clients} updates"
    shown = "the best" if attack.num_inputs > len(names) else "all"
    caption = (
        f"{attack.case}, from {what}: {shown} {len(names)} of {attack.num_inputs} reconstructions, "
        f"mean PSNR {attack.psnr:.1f} dB (baseline {attack.baseline:.1f} dB)."
    )
    # A row of few pictures must not be enlarged to the width of the page.
    filler = "<td></td>" * (MAX_PICTURES - len(names))
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    rows = _row("original", originals, names, filler)
    rows += _row("attack", reconstructions, names, filler)
    return (
        f'<figure><table class="pictures"><thead><tr><td></td>{head}{filler}</tr></thead>'
        f"<tbody>{rows}</tbody></table><figcaption>{text(caption)}</figcaption></figure>"
    )


def _row(name: str, images: Tensor, classes: Sequence[str], filler: str) -> str:
    cells = "".join(
        f"<td>{image_element(image, f'{label}, {name}')}</td>"
        for image, label in zip(images, classes, strict=True)
    )
    return f'<tr><th scope="row">{name}</th>{cells}{filler}</tr>'


def _membership(audit: Audit) -> str:
    """The table of membership inference, and what does not apply."""
    note = audit.membership.get("note", "")
    content = f"<p>{text(note)}</p>" if note else ""
    rows = membership_rows(audit)
    if not rows:
        return content
    counts = f"{audit.membership['members']} members, {audit.membership['others']} others"
    if "generated" in audit.membership:
        counts += f", {audit.membership['generated']} generated inputs"
    return (
        f"{content}{_table(MEMBERSHIP_COLUMNS, rows, num_text_columns=1)}"
        f'<p class="note">{text(counts)}. {text(MEMBERSHIP_NOTE)}</p>'
    )


def _notes(audit: Audit) -> str:
    items = "".join(f"<li>{text(note)}</li>" for note in audit.notes)
    return f"<ul>{items}</ul>"


def _settings(audit: Audit) -> str:
    """How the audit was made, and by what."""
    names = ("command", "started", "fedcog", "commit", "torch", "python", "device", "system")
    facts = {name: value for name, value in audit.settings.items() if value is not None}
    facts |= {name: audit.provenance[name] for name in names if name in audit.provenance}
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>'
        for name, value in facts.items()
    )
    return table("", rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """Format a table; the columns after the first `num_text_columns` are numbers."""
    used = used_columns(columns, rows)
    kinds = ["" if index < num_text_columns else ' class="number"' for index in used]
    head = "".join(
        f'<th scope="col"{kind}>{text(columns[index])}</th>'
        for kind, index in zip(kinds, used, strict=True)
    )
    body = ""
    for row in rows:
        cells = "".join(
            f"<td{kind}>{text(row[index])}</td>"
            for kind, index in zip(kinds[1:], used[1:], strict=True)
        )
        body += f'<tr><th scope="row">{text(row[0])}</th>{cells}</tr>'
    return table(head, body)
