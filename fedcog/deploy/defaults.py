"""Settings of a deployment besides those of an experiment."""

from typing import Any

DEPLOYMENT_DEFAULTS: dict[str, Any] = {
    "out": "runs/federation",
    "patience": 600.0,
    "data": "",
    "classes": "",
}
"""`out`: run directory of the server. `patience`: seconds that the server waits for an answer.
`data`: where the server's test examples are, if nodes have their own data. `classes`: names of all
classes, separated by commas, if nodes have their own data."""
