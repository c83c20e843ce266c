"""Raylets for the tests: ``head`` starts a cluster, ``add NAME`` a node with one core; answers are lines of JSON.

In a process of its own: Ray keeps threads and handlers in whoever starts it, and all must end when the tests do.
"""

from __future__ import annotations

import json
import os
import sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what Ray prints is no answer

from ray.cluster_utils import Cluster  # noqa: E402

cluster = Cluster()
for line in sys.stdin:
    word, *names = line.split()
    if word == "head":
        cluster.add_node(num_cpus=0, node_name="head", include_dashboard=False, object_store_memory=80 * 2**20)
        answer = cluster.address
    else:
        node = cluster.add_node(num_cpus=1, node_name=names[0], object_store_memory=80 * 2**20)
        answer = node.all_processes["raylet"][0].process.pid
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
cluster.shutdown()
