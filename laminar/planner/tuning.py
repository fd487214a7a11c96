"""Tuning numbers of the planner: where a search looks, when it stops, and what its estimates take for granted.

None of them can make a plan wrong or a bound too high. They trade time for quality: which plan is found, how soon, and
how close the bound comes. What a space consists of, and what belongs to one algorithm alone, stands with that.

Where a number comes from stands behind it:

    chosen    by hand; no sweep of it is recorded
    assumed   a guess about machines or programs that nobody has measured
    counted   follows from how the package works
"""

from __future__ import annotations

import math

# --- estimates (`planner/estimate`, `planner/space`)

SCORED_DEPTHS = (2, 4)
"""Depths of the shallow models that are simulated. Counted: gradients of a layer may share a bucket with those of the
next, hence an even difference."""
MEMORY_DOUBT = 1.015
"""How much more than there is an estimate of memory may say, for a plan to be worth simulating. Chosen."""
WORTH_SIMULATING = 0.998
"""What is expected to take less than this of the best is simulated at full depth. Chosen."""
HOPELESS_SCORE = 1.25
"""A placement that is so much slower than the best is not asked how much it holds. Chosen."""
CRAMPED_CELL = 1.5
"""A cell in which nothing is guessed to fit is taken to be so much slower than it is guessed to be. Chosen."""
SCALED_SAMPLES = 8
"""What a micro-batch takes is guessed from one of at most so many times as many samples, or as few. Chosen."""
SHORT_HOP = 0.05
"""A hop between stages that takes so much of a stage's work, or less, is short. Chosen."""
SHARDED_GRADIENTS = 0.955
"""With sharded state gradients travel half as far, and slow the work down less: by no more than this. Assumed."""
HIDDEN_BY_STEP = 0.8
"""Share of the work of a step without micro-batches beside which gradients and parameters travel. Assumed."""
HIDDEN_REDUCTION = 0.9
"""Share of the gradients' reduction that other work is taken to hide, where it is taken to hide any. Assumed."""
REDUCED_ONCE = 0.99
"""Share of the gradients' reduction that a micro-batch does not pay, if it is done once for all of them. Assumed."""
FUSED_SHARE = 0.5
"""Of what an elementwise op moves by itself, what it costs beside others in one kernel. Assumed."""
FUSED_KEPT = 0.5
"""Of what forward keeps, what is left if a compiler may recompute cheap values. Assumed."""
SMALL_PARAMETERS = 0.005
"""Share of all parameters that stays whole in all stages of ZeRO, the smallest tensors first: it saves next to nothing
to shard them, and every shard is a kernel. Assumed."""
LEAST_BYTE_S = 1e-9
"""What a stored byte costs where nothing else matters. Chosen: far below any exchange."""

# --- what becomes of activations and parameters where memory is short (`planner/estimate`)

ACTIVATION_MIXES = 5
"""Mixes of one placement that are simulated at full depth. Chosen."""
RECOMPUTE_TRIES = 4
"""Plans of one cell that are simulated at full depth to find out how many blocks have to be recomputed. Chosen."""
FEWER_BLOCKS = 0.995
"""Fewer blocks are tried if the slowest stage is expected to get shorter than this of what it was. Chosen."""
EVEN_STAGES = 0.95
"""Stages are cut so that none takes less than this of the slowest, unless there is nothing more to cut. Assumed."""
LAYER_GRID = 128
"""Numbers of layers, and of seconds, between which the estimate of a place is drawn as a line. Chosen."""
STORAGE_GROUPS = 12
"""Groups of parameters for which other ways to store them are tried: those that hold most. Chosen."""
STORAGE_MIXES = 3
"""Mixes of one placement that are simulated at full depth. Chosen."""
MIXED_PLACEMENTS = 2
"""Placements for which mixes are made. Chosen."""
LITTLE_SAVED = 0.02
"""A group that could save less than this of what is too much is left as it is. Chosen."""
STORAGE_SOLVE_S = 0.5
"""Seconds to choose a way for each group. Chosen."""

# --- best-first search (`planner/search/best_first`)

PROMISING_CELL = 1.03
"""How much slower than the best a cell may be guessed to be, to be looked at. Chosen."""
PLENTY_OF_MEMORY = 10
"""How many times what a rank holds at least must fit for memory not to be asked about before the end. Chosen."""
FIRST_MICRO_BATCHES = 4
"""Micro-batches for each stage of the pipeline that is tried first, at most. Chosen."""
SAME_MEMORY = 0.98
"""Two estimates of memory within this are the same. Chosen."""
NEAR_BEST = 1.03
"""How far the score of a finalist may be from the best plan. Chosen."""
NEAR_FINALISTS = 1
"""Plans near the best that are simulated at full depth in the end, and as many that have a name. Chosen."""
UNEVEN_PLACES = 1.02
"""How much more than the mean the slowest place does, for places with several stages to be evened out. Chosen."""
EVENED_PLANS = 2
"""Plans in which they are. Chosen."""
AS_GOOD = 1.005
"""Plans within this of the best are as good as it: the simplest of them is taken. Chosen."""

# --- rewritten graphs (`planner/space/rewrites.py`)

SIMULATED_VARIANTS = 8
"""Variants that are simulated at most, the graph as captured among them. Chosen."""
VARIANTS_BUDGET = 0.2
"""Share of the budget that this may take: fewer are simulated where graphs are large, or time is short. Chosen."""
VARIANT_OP_S = 5e-4
"""Processor seconds to make and simulate one op of a variant: about, and the same everywhere, so that plans are.
Assumed."""
SEARCHED_VARIANTS = 2
"""Of those, how many may be searched besides the graph as captured: each costs about what that costs. Chosen."""
VARIANT_GAIN = 0.005
"""A variant must be expected to save this share of a step. Counted: plans within `AS_GOOD` count as equal, and then the
one without rewrites is simpler."""
SAME_STEP = 1e-3
"""Differences below this share of a step are none. Chosen."""

# --- branches on devices of their own (`planner/search/best_first/branches.py`)

SECOND_BRANCH = 0.1
"""Share of the work, or of the parameters, that a second branch has at least. Chosen."""
LIGHT_TRUNK = 0.03
"""Share of the work outside of branches below which one micro-batch keeps all sets busy. Chosen."""
BUSIEST_SET = 1.3
"""How much more than that of the best split the busiest set may have to do. Chosen."""
BRANCH_WAYS = 12
"""Ways to deal out the branches of each region. Chosen."""
BRANCH_REGIONS = 2
"""Regions that are looked at. Chosen."""
SIMULATED_WAYS = 6
"""Ways that are simulated at most. Chosen."""
NEAR_WAY = 1.1
"""Ways this close to the best one try other placements. Chosen."""
BRANCH_BUDGET = 0.1
"""Share of the time that may go into it where nothing is left. Chosen."""

# --- clusters whose parts differ (`planner/search/mixed_cluster.py`)

GUESSING_BUDGET = 0.45
"""Share of the budget for guesses; what is left is for simulations and for parts alone. Chosen."""
PIPELINES_BUDGET = 0.7
"""Share of the budget at which pipelines are done with. Chosen."""
HOPEFUL_CELL = 1.12
"""How far beyond the best guess a cell may lie by an ideal machine and still be priced. Chosen."""
NEAR_GUESS = 1.04
"""How far beyond the best plan a guess may lie and still be simulated. Chosen."""
SIMULATED_GUESSES = 6
"""Pipelines that are simulated at most. Chosen."""
RECUTS = 4
"""How often one is cut at most. Chosen."""
EXCESS_MARGIN = 1.15
"""How much more than its excess a place that holds too much is to give away. Chosen."""
LEVEL_STAGES = 1.015
"""A slowest stage within this of the mean is good enough. Chosen."""
CROWDED_RANK = 0.6
"""Share of the memory that weights and gradients may take by a rough count, for a cell to be among the first.
Chosen."""

# --- what is left of a cluster (`planner/search/replan.py`)

USED_DEVICES = 0.7
"""Share of the devices that an arrangement with stages uses at least. Chosen."""
SCALED_FROM = 2
"""Samples of a rank for which a micro-batch is simulated; others are in proportion. Chosen."""
FIXED_SHARE = (0.25, 0.5)
"""Of its seconds, what does not grow or shrink with samples: without tensor parallel ranks and with. Assumed; a GPT of
355M on H100 and A100 has 0.2 to 0.28 and 0.5 to 0.6."""
SECOND_PLAN_S = 0.5
"""Processor seconds after which no second plan is simulated in full. Chosen."""

# --- where nothing fits (`planner/search/infeasible.py`)

WAY_OUT_S = 1.0
"""Processor seconds for one more search. Chosen."""
WAYS_OUT_S = 12.0
"""After so many no further way out is looked for. Chosen."""
MEMORY_PROBES = 3
"""How often fewer bytes are tried. Chosen."""
MEMORY_FOUND = 1.03
"""Bytes are found to within this. Chosen."""

# --- lower bounds (`planner/bounds`): any of these give one, and the largest of them counts

LEVEL_WEIGHTS = ((0.65, 0.65, 0.4), (0.3, 0.3, 0.4))
"""How much the inner level counts of two: beside work, in reducing gradients, and after the update. Chosen."""
LEVEL_WEIGHTS_MICRO = ((0.5, 0.1, 0.1), (0.9, 0.1, 0.1))
"""The same with micro-batches, where these don't run at the same time. Chosen."""
WORK_WEIGHTS = (0.7, 0.45)
"""How much everything counts against exchanges alone. Chosen."""
MEMORY_WORTHS = (0.1, 0.2, 0.4, 0.8, 1.6)
"""What all memory is taken to be worth, of the work of a micro-batch: one after the other, while that proves more.
Chosen."""
FEW_MICRO_BATCHES = 4
"""Micro-batches up to which looking at the batch in one first is no help. Chosen."""
VALUE_WORTHS = (0.1, 0.5, 1.0)
"""What is tried for the worth of values between layers, of what it takes to make them whole. Chosen."""
DOMINATED_SHARES = (0.03, 0.1, 0.3, math.inf)
"""Signatures that cost more than the cheapest by this share of the whole are left out, while that proves enough.
Chosen."""
STRETCH_SHARES = tuple(k / 8 for k in range(9))
"""What (2) of `memory_bound.py` counts beside the stretch: all of these are tried. Chosen."""
FEW_BESIDE = 8
"""Ops beside an exchange up to which it may be waited for. Chosen."""
PART_WEIGHTS = 25
"""Of how much a second part counts beside the first, values that are tried. Chosen."""
BOUND_PRECISION = 1e-5
"""How exactly the least step of a pipeline is found, as a share of it. Chosen."""
