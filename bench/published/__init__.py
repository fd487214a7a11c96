"""Step times that others have published, predicted: the simulator judged by machines it has never seen.

    python -m bench.published --csv FILE [--json | --unnamed]

Each row is a model, a plan and a cluster. The model's block is captured on the meta device, placed, lowered and priced
like any other graph (`bills`, `prices`); depth, stages and micro-batches follow from it (`steps`, `pipes`). What a
software stack does is stated by its row or follows from it (`features`), how a cluster is wired is a fact with a source
(`machines`); what is fitted is ten numbers for each kind of device (`fit`, `constants.json`). How well that holds for a
system that nobody has named is measured by leaving out each in turn (`unnamed`).
"""
