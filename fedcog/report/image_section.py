"""The section of a report that shows generated images, with real ones for comparison."""

import base64
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image
from torch import Tensor

from fedcog.report import run_values
from fedcog.report.markup import NO_VALUE, text
from fedcog.runs.records.recorded_run import Run
from fedcog.runs.records.run_directory import RecordError, RunDirectory

PIXELATED_BELOW = 64
"""Images with fewer pixels on their longer side are enlarged without smoothing."""


def generated_section(runs: Sequence[Run]) -> str:
    """Show the latest generated images of the first run that has some, or why there are none."""
    reason = "No run here has generated inputs."
    if any(_generates_on_flower(run) for run in runs):
        reason = "Flower clients keep their generated inputs: no images are sent to the server."
    for run in runs:
        directory = RunDirectory(run.path)
        for name in directory.artifact_files()[-1:]:
            try:
                tensors = directory.tensors(name)[0]
            except RecordError as error:
                reason = str(error)
                continue
            if {"images", "labels", "steps"} <= tensors.keys() and tensors["images"].dim() == 5:
                return _figure(run, int(Path(name).stem), tensors)
            reason = (
                "The inputs of this data set are not pictures, so generated ones are not shown."
            )
    return f"<p>{text(reason)}</p>"


def _generates_on_flower(run: Run) -> bool:
    generates = run_values.first_generating_round(run.experiment) is not None
    return generates and run.experiment.backend == "flower"


def _figure(run: Run, round: int, generated: dict[str, Tensor]) -> str:
    """Show one row per recorded generation step, one column per target, and real images below."""
    tensors, about = run_values.federation(run)
    is_multi_label = generated["labels"].dim() == 2
    targets = [
        row.nonzero()[:, 0].tolist() if is_multi_label else [int(row)]
        for row in generated["labels"]
    ]
    classes = about.get("classes", ())
    names = [" + ".join(_class_name(classes, label) for label in labels) for labels in targets]
    rows = [
        _row(f"step {step}", "", images, names)
        for step, images in zip(generated["steps"].tolist(), generated["images"], strict=True)
    ]
    remark = "No real pictures were recorded to compare with; values outside 0 to 1 are clipped."
    if {"real_images", "real_labels"} <= tensors.keys():
        first_labels = [labels[0] if labels else None for labels in targets]
        rows.append(_row("real", ' class="real"', _real_images(tensors, first_labels), names))
        what = "the first label" if is_multi_label else "the same classes"
        remark = f"The last row shows real pictures of {what}."
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in names)
    caption = (
        f"What {_client_text(run, round)} generated in round {round} "
        f"({run_values.algorithm_of(run)}, seed {run.experiment.seed}): from noise, step by "
        f"step, towards the class above each column. {remark} They may look like noise: they are "
        "made to convince the global model, not people."
    )
    return (
        f'<figure><table class="pictures"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def _class_name(classes: Sequence[object], label: int) -> str:
    return str(classes[label]) if label < len(classes) else str(label)


def _real_images(tensors: dict[str, Tensor], labels: Sequence[int | None]) -> list[Tensor | None]:
    """A recorded real image for each label; several images of a class take turns."""
    real_labels = tensors["real_labels"].tolist()
    images = list[Tensor | None]()
    for index, label in enumerate(labels):
        candidates = [place for place, real in enumerate(real_labels) if real == label]
        if not candidates:
            images.append(None)
            continue
        num_before = labels[:index].count(label)
        images.append(tensors["real_images"][candidates[num_before % len(candidates)]])
    return images


def _client_text(run: Run, round: int) -> str:
    """Name the client whose images are shown."""
    if run.experiment.devices:  # the first client of the round may not have answered
        return "one client"
    for record in run.lines:
        if record["round"] == round and record.get("clients"):
            return f"client {record['clients'][0]}"
    return "one client"


def _row(name: str, attributes: str, images: Iterable[Tensor | None], names: Sequence[str]) -> str:
    cells = ""
    for image, column in zip(images, names, strict=True):
        content = NO_VALUE if image is None else image_element(image, f"{column}, {name}")
        cells += f"<td>{content}</td>"
    return f'<tr{attributes}><th scope="row">{name}</th>{cells}</tr>'


def image_element(image: Tensor, description: str) -> str:
    """Embed a uint8 image into a page.

    Args:
        image: `(C, H, W)`.
        description: What it shows, as plain text.

    Returns:
        HTML.
    """
    small = ' class="small"' if max(image.shape[1:]) < PIXELATED_BELOW else ""
    data = base64.b64encode(png(image)).decode()
    return f'<img{small} alt="{text(description)}" src="data:image/png;base64,{data}">'


def png(image: Tensor) -> bytes:
    """Encode a uint8 image (C, H, W) as a PNG; without 3 or 4 channels, only its first one."""
    channels = image if image.shape[0] in (3, 4) else image[:1]
    pixels = channels.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, format="PNG")
    return file.getvalue()
