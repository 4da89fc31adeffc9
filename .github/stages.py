#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Choose a job of channel.yml for each recipe that has to be built.

Standard input is the output of `./forge plan --json`. This program prints a line JOB=RECIPES for
each job that has recipes; other jobs are skipped. The jobs are `aotriton`, `pytorch`, `sdk` (all
other recipes that need neither AOTriton nor PyTorch), and `layer1`, `layer2` and so on. The recipes
of a layer need only recipes of `aotriton`, `pytorch`, `sdk` and of earlier layers. The RECIPES of a
layer are a JSON list, because its job is a matrix; those of other jobs are separated by spaces.
"""

import json
import re
import sys
from pathlib import Path

STAGES = ("aotriton", "pytorch")
WORKFLOW = Path(__file__).parent / "workflows/channel.yml"
# The number of layers that channel.yml has jobs for.
LAYERS = len(set(re.findall(r"needs\.plan\.outputs\.layer(\d+)", WORKFLOW.read_text())))


def sort_recipes(rows: list[dict]) -> dict[str, str]:
    """Return the recipes that each job builds, as text. The rows are a plan's, in build order."""
    layers: dict[str, int] = {}
    jobs: dict[str, list[str]] = {}
    for row in rows:
        name = row["recipe"]
        for need in row["needs"]:
            if need not in layers:
                sys.exit(f"{name} needs {need}, which is not before it in the plan")
        needed = [0 if need in STAGES else layers[need] for need in row["needs"]]
        layers[name] = -1
        if needed and max(needed) >= 0:
            layers[name] = max(needed) + 1
        job = f"layer{layers[name]}" if layers[name] > 0 else "sdk"
        job = name if name in STAGES else job
        if row["action"] == "build":
            jobs.setdefault(job, []).append(name)
    deepest = max((layers[name] for name in layers if name not in STAGES), default=0)
    if deepest > LAYERS:
        sys.exit(f"channel.yml has {LAYERS} layers, but the recipes need {deepest}: add a job")
    return {
        job: json.dumps(names) if job.startswith("layer") else " ".join(names)
        for job, names in jobs.items()
    }


if __name__ == "__main__":
    for job, value in sort_recipes(json.load(sys.stdin)).items():
        print(f"{job}={value}")
