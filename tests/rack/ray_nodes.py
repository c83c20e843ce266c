"""A Ray cluster for the tests: the nodes alpha, which is the head and has the drivers, and beta, of one core each.

``BETA_PYTHONPATH`` of the environment is where the Python processes of beta look for modules first. Prints the head's
address and runs until standard input ends. It is a separate process because Ray keeps threads and signal handlers in
the one that starts it, and all must end when the tests do.
"""

from __future__ import annotations

import os
import sys
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what Ray prints is no answer

from ray.cluster_utils import Cluster  # noqa: E402

STORE_BYTES = 80 * 2**20

cluster: Any = Cluster()
for name in ("alpha", "beta"):
    own: dict[str, Any] = {"include_dashboard": False}
    if name == "beta":
        first = os.environ.get("BETA_PYTHONPATH", "")
        own = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, [first, os.environ["PYTHONPATH"]]))}}
    cluster.add_node(num_cpus=1, node_name=name, object_store_memory=STORE_BYTES, **own)
print(cluster.address, file=answers, flush=True)
sys.stdin.read()
cluster.shutdown()
