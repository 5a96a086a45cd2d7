"""W&B's own files of a run: records in LevelDB's log format, the last of which may be torn."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32768
FRAME_HEADER_BYTES = 7
FULL_RECORD = 1
"""Type of a frame that holds a whole record."""
LAST_FRAME = 4
"""Type of the last frame of a record in several frames."""
MAX_RECORD_BYTES = 64 * 2**20


def last_step(folder: Path, run_id: str) -> int:
    """Return the last step of a run in its files; 0 if there is none.

    Args:
        folder: W&B's folder in the run directory.
        run_id: W&B's id of the run.

    Returns:
        The last step.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    last = 0
    for path in sorted(folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb")):
        with open(path, "rb") as file:
            for content in records(file):
                for item in Record.FromString(content).history.item:
                    if _item_name(item) == "_step":
                        last = max(last, int(item.value_json))
    return last


def records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the complete records of a file."""
    position = FILE_HEADER_BYTES
    file.seek(position)
    record = b""
    while True:
        room = BLOCK_BYTES - position % BLOCK_BYTES
        if room < FRAME_HEADER_BYTES:  # the rest of the block is padding
            position += room
            file.seek(position)
        frame = file.read(FRAME_HEADER_BYTES)
        size = int.from_bytes(frame[4:6], "little")
        frame_type = frame[6] if len(frame) == FRAME_HEADER_BYTES else 0
        part = file.read(size)
        is_valid = FULL_RECORD <= frame_type <= LAST_FRAME and len(part) == size
        if not is_valid or len(record) > MAX_RECORD_BYTES:
            return  # torn here: what is lost is logged again
        position += FRAME_HEADER_BYTES + size
        record += part
        if frame_type in (FULL_RECORD, LAST_FRAME):
            yield record
            record = b""


def _item_name(item: object) -> str:
    return str(getattr(item, "key", "")) or "/".join(getattr(item, "nested_key", ()))
