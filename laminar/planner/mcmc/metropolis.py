"""A Metropolis-Hastings chain over the placements of one graph on one mesh.

A state gives every op and every stored tensor one of its options (`planner/mcmc/additive_cost.py`). Two kinds of moves:

    one       one site gets another option, drawn either by how dear options are in themselves, or so that it fits what
              a neighbour makes or reads. The draw knows the neighbours and not the site's own option, so that the
              chance of the way back is the same draw's chance of the old option.
    class     sites at the same place of all layers: those with option a get b, and those with b get a. a is that of a
              member drawn evenly, b is drawn by how dear it is. Doing it again undoes it.

A move from x to y is accepted with probability min(1, exp(-(cost(y) - cost(x)) / T) * q(y -> x) / q(x -> y)), where x
is where the chain stands, not the best it has seen: so that at a fixed temperature T it visits a state as often as
exp(-cost / T) says (detailed balance, tested by enumeration). Costs are known by their differences. All chance comes
from the seed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from laminar.planner.mcmc.additive_cost import Additive, SiteMove, SiteTable

FOLLOW_NEIGHBOUR = 0.9
"""How often a single move follows a neighbour."""
MOVE_CLASS = 0.2
"""How often a whole class moves. Of some mixtures tried on a GPT these two came lowest."""


class Chain:
    """The chain itself: a sum of costs, and a temperature."""

    def __init__(
        self,
        cost: Additive,
        together: Sequence[tuple[int, ...]] = (),
        seed: int = 0,
        *,
        follow: float = FOLLOW_NEIGHBOUR,
        share: float = MOVE_CLASS,
    ) -> None:
        """`together` are the classes, `share` how often one of them is moved."""
        self.cost, self.classes, self.rng = cost, list(together), random.Random(seed)
        self.follow, self.share = follow, share if together else 0.0
        self.temperature = 0.0
        self.accepted = self.proposals = 0
        self.free = [s for s, t in enumerate(cost.tables) if len(t.options) > 1]
        self._drawn: dict[int, tuple[list[float], list[float]]] = {}
        self._tables: list[SiteTable] = []
        self.neighbours = [self._around(s) for s in range(len(cost.tables))]

    # --- proposals

    def _around(self, site: int) -> list[tuple[int, int, bool]]:
        """The values through which a site touches others: place among its tensors, value, whether it reads it."""
        cost = self.cost
        both = {v for v, _ in cost.reads[site]} & {v for v, _ in cost.makes[site]}
        ins = len(cost.tables[site].options[0].ins)
        found = [(i, v, True) for v, i in cost.reads[site] if v not in both]
        return found + [(ins + i, v, False) for v, i in cost.makes[site] if v not in both and cost.wants[v]]

    def weights(self, site: int) -> tuple[list[float], list[float]]:
        """How likely each option is by itself, and these added up: dear ones less, none never."""
        table = self.cost.tables[site]
        found = self._drawn.get(id(table))
        if found is None:
            seconds = [o.seconds for o in table.options]
            least = min(seconds)
            raw = [1 / (1 + (s - least) / (least + 1e-6)) for s in seconds]
            total = sum(raw)
            chances = [r / total for r in raw]
            found = self._drawn[id(table)] = (chances, list(accumulate(chances)))
            self._tables.append(table)  # so that no other gets its id
        return found

    def chance(self, site: int, option: int) -> float:
        """The probability with which a single move of a site, once drawn, asks for an option.

        Nothing in it depends on the option that the site has.
        """
        cost, around = self.cost, self.neighbours[site]
        follow = self.follow if around else 0.0
        total = (1 - follow) * self.weights(site)[0][option]
        if not follow:
            return total
        table = cost.tables[site]
        row = table.options[option]
        ins = len(row.ins)
        followed = 0.0
        for place, v, reads in around:
            nd = row.ins[place] if place < ins else row.outs[place - ins]
            if reads:
                if cost.made[v] == nd:
                    followed += 1 / len(table.fitting[place][nd])
            else:
                wants = cost.wants[v]
                same = wants.count(nd)
                if same:
                    followed += same / len(wants) / len(table.fitting[place][nd])
        return total + follow * followed / len(around)

    def _asked(self, site: int) -> int:
        """An option for a site, drawn as `chance` says; its own where nothing fits the neighbour."""
        rng, cost, around = self.rng, self.cost, self.neighbours[site]
        if around and rng.random() < self.follow:
            place, v, reads = around[int(rng.random() * len(around))]
            wants = cost.wants[v]
            nd = cost.made[v] if reads else wants[int(rng.random() * len(wants))]
            fits = cost.tables[site].fitting[place].get(nd, ())
            return fits[int(rng.random() * len(fits))] if fits else cost.at[site]
        chances, added = self.weights(site)
        return min(bisect(added, rng.random()), len(chances) - 1)

    def propose(self) -> tuple[SiteMove, float]:
        """A move, and the Hastings factor: the chance of the way back over that of the way there. Empty: stay."""
        rng, cost = self.rng, self.cost
        if self.share and rng.random() < self.share:
            members = self.classes[int(rng.random() * len(self.classes))]
            first = members[int(rng.random() * len(members))]
            chances, added = self.weights(first)
            a, b = cost.at[first], min(bisect(added, rng.random()), len(chances) - 1)
            move = [(s, b if cost.at[s] == a else a) for s in members if cost.at[s] in (a, b)] if a != b else []
            return move, self.back_together(move) if move else 1.0
        site = self.free[int(rng.random() * len(self.free))]
        option = self._asked(site)
        if option == cost.at[site]:
            return (), 1.0
        return ((site, option),), self.back_alone(site, option)

    def back_alone(self, site: int, option: int) -> float:
        """The chance of a single move's way back over that of the way there."""
        return self.chance(site, self.cost.at[site]) / self.chance(site, option)

    def back_together(self, move: SiteMove) -> float:
        """The same of a class: either of the two options may be the first member's, the other one is drawn."""
        site, b = move[0]
        a = self.cost.at[site]
        have_a = sum(self.cost.at[s] == a for s, _ in move)
        have_b = len(move) - have_a
        chances = self.weights(site)[0]
        return (have_b * chances[b] + have_a * chances[a]) / (have_a * chances[b] + have_b * chances[a])

    def accepts(self, delta_s: float, factor: float) -> float:
        """The probability with which a proposed move is made."""
        if not self.temperature:
            return 1.0 if delta_s < 0 else 0.0
        power = -delta_s / self.temperature
        return 1.0 if power > 500 else min(1.0, math.exp(power) * factor)

    def step(self) -> bool:
        """One proposal; whether it was accepted."""
        self.proposals += 1
        move, factor = self.propose()
        if not move:
            return False
        delta_s, change = self.cost.move_s(move)
        chance = self.accepts(delta_s, factor)
        if chance < 1.0 and self.rng.random() >= chance:
            return False
        self.cost.make(move, delta_s, change)
        self.accepted += 1
        return True
