"""Settings of a deployment besides those of an experiment."""

from typing import Any

DEPLOYMENT_DEFAULTS: dict[str, Any] = {
    "out": "runs/federation",
    "patience": 600.0,
    "data": "",
    "classes": "",
    "shape": "",
}
"""`out`: run directory of the server. `patience`: seconds that the server waits for an answer.
`data`: where the server's test examples are, if nodes have their own data. `classes`: names of all
classes, separated by commas, if nodes have their own data. `shape`: shape of one input, such as
3x32x32, if nodes have their own data and the server has no test examples."""
