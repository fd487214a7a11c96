"""Step times that others have published, predicted: the simulator judged by machines it has never seen.

    python -m bench.published --csv FILE [--json]

Each row is a model, a plan and a cluster. The model's block is captured on the meta device, placed, lowered and priced
like any other graph (`bills`, `prices`); depth, stages and micro-batches follow from it (`steps`, `pipes`). What a
software stack does, and how a cluster is wired, are facts with sources (`stacks`, `machines`); what is fitted is ten
numbers for each kind of device (`fit`, `constants.json`).
"""
