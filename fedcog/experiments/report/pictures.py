"""The section of generated inputs: pictures on their way from noise, with real ones below."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from fedcog.experiments.record import RecordError, RunDirectory
from fedcog.experiments.report import readings
from fedcog.experiments.report.markup import NONE, text
from fedcog.experiments.run import Run


def generated(runs: Sequence[Run]) -> str:
    """The latest generated pictures of the first run that has some, or why there are none."""
    why = "No run here has generated inputs."
    if any(run.experiment.backend == "flower" and readings.wake(run.experiment) is not None for run in runs):
        why = "What clients generate stays with them: no pictures of it are sent."
    for run in runs:
        directory = RunDirectory(run.path)
        for name in directory.exhibits()[-1:]:
            try:
                shown = directory.tensors(name)[0]
            except RecordError as error:
                why = str(error)
                continue
            if {"images", "labels", "steps"} <= shown.keys() and shown["images"].dim() == 5:
                return _pictures(run, int(Path(name).stem), shown)
            why = "The inputs of this data set are not pictures, so the generated ones are not shown."
    return f"<p>{text(why)}</p>"


def _pictures(run: Run, round: int, shown: dict[str, Tensor]) -> str:
    """Generated pictures, a row for each mark on the way and a column for each target, with real ones below."""
    tensors, about = readings.federation(run)
    known, several = about.get("classes", ()), shown["labels"].dim() == 2
    asked = [row.nonzero()[:, 0].tolist() if several else [int(row)] for row in shown["labels"]]
    names = [" + ".join(str(known[label]) if label < len(known) else str(label) for label in own) for own in asked]
    labels = [own[0] if own else None for own in asked]
    rows = [
        _row(f"step {step}", "", images, names)
        for step, images in zip(shown["steps"].tolist(), shown["images"], strict=True)
    ]
    real = "No real pictures were recorded to compare with; values outside 0 to 1 are clipped."
    if {"real_images", "real_labels"} <= tensors.keys():
        real_labels = tensors["real_labels"].tolist()
        places = [[place for place, own in enumerate(real_labels) if own == label] for label in labels]
        chosen = [found[labels[:n].count(labels[n]) % len(found)] if found else None for n, found in enumerate(places)]
        pictures = [None if place is None else tensors["real_images"][place] for place in chosen]
        rows.append(_row("real", ' class="real"', pictures, names))
        real = f"The last row holds real pictures of {'the first label' if several else 'the same classes'}."
    client = next((line["clients"][0] for line in run.lines if line["round"] == round and line.get("clients")), None)
    maker = "one client" if client is None or run.experiment.devices else f"client {client}"  # the first may be silent
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    caption = (
        f"What {maker} generated in round {round} ({readings.name(run)}, seed {run.experiment.seed}): from noise, "
        f"step by step, towards what is named above each column. {real} To the eye they may stay noise: they are "
        "made to convince the global model, not people."
    )
    return (
        f'<figure><table class="pictures"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def _row(name: str, mark: str, images: Iterable[Tensor | None], classes: Sequence[str]) -> str:
    cells = "".join(
        f"<td>{NONE}</td>" if image is None else f"<td>{_picture(image, f'{label}, {name}')}</td>"
        for image, label in zip(images, classes, strict=True)
    )
    return f'<tr{mark}><th scope="row">{name}</th>{cells}</tr>'


def _picture(image: Tensor, words: str) -> str:
    """A uint8 image [C, H, W] as a PNG in the page."""
    small = ' class="small"' if max(image.shape[1:]) < 64 else ""
    data = base64.b64encode(png(image)).decode()
    return f'<img{small} alt="{text(words)}" src="data:image/png;base64,{data}">'


def png(image: Tensor) -> bytes:
    """A uint8 image [C, H, W] as a PNG."""
    channels = image if image.shape[0] in (3, 4) else image[:1]
    pixels = channels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG")
    return file.getvalue()
