"""Reading and writing of TOML settings files."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from fedcog.core.settings import ConfigError


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the settings in a TOML file, without checking them.

    Raises:
        ConfigError: If the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror or error}."]) from error
    except (ValueError, RecursionError) as error:  # tomllib lets a RecursionError through
        raise ConfigError([f"{path} is not a TOML file: {error}."]) from error


def to_toml_value(value: Any) -> str:
    """Return a value in TOML, which equals JSON except for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_toml_key(name: str) -> str:
    """Return a TOML key, quoted only if necessary."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else to_toml_value(name)
