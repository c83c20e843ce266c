"""The checks: each module yields observations about one side of the artefacts."""
