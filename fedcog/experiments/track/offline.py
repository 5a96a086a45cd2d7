"""What W&B's own files have of a run: blocks of records in LevelDB's log format, the last of which may be torn."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

HEADER, BLOCK, FRAME = 7, 32768, 7  # bytes before the first record, of a block, and before each part of a record
WHOLE, LAST = 1, 4  # a record in one part, and the end of one in several
LARGEST = 64 * 2**20  # bytes of a record


def last_step(folder: Path, run: str) -> int:
    """The last step of a run that is in its files; 0 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    found = 0
    for path in sorted(folder.glob(f"*run-*-{run}/run-{run}.wandb")):
        with open(path, "rb") as file:
            for content in records(file):
                history = Record.FromString(content).history
                found = max([found, *(int(one.value_json) for one in history.item if _named(one) == "_step")])
    return found


def records(file: BinaryIO) -> Iterator[bytes]:
    """The whole records of a file."""
    file.seek(HEADER)
    place, record = HEADER, b""
    while True:
        if BLOCK - place % BLOCK < FRAME:  # no room for another: the rest of the block is empty
            place += BLOCK - place % BLOCK
            file.seek(place)
        frame = file.read(FRAME)
        size, kind = int.from_bytes(frame[4:6], "little"), frame[6] if len(frame) == FRAME else 0
        part = file.read(size)
        if not WHOLE <= kind <= LAST or len(part) < size or len(record) > LARGEST:
            return  # torn here: what was lost is told again
        place, record = place + FRAME + size, record + part
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def _named(item: object) -> str:
    return str(getattr(item, "key", "")) or "/".join(getattr(item, "nested_key", ()))
