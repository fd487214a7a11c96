"""The graph and the cluster that a question about a plan is answered with: given, remembered, or named by the plan."""

from __future__ import annotations

from laminar.errors import PlanError
from laminar.ir.clusters.cluster import Cluster
from laminar.ir.graph import Graph
from laminar.ir.plans.planned import Planned
from laminar.placement.micro_batch import micro
from laminar.rules.samples import samples_of


def graph_for(plan: Planned, graph: Graph | None) -> Graph:
    """The graph of a plan's whole batch: given, or remembered; where its batch was free, cut from a larger one."""
    if graph is not None:
        return graph_of_own_batch(plan, graph)
    if plan.origin is None:
        recipe = plan.account.recipe
        where = f"laminar.api.graph_of({recipe!r})" if recipe else "laminar.capture(model, loss, batch)"
        raise PlanError("this plan does not carry its graph", next=f"hand it over: graph={where}")
    return plan.origin.graph


def graph_of_own_batch(plan: Planned, graph: Graph) -> Graph:
    """The graph of the batch that a plan is for, from that of the batch it was captured with."""
    taken = plan.account.batch
    if taken is None:
        return graph
    samples = samples_of(graph)
    if samples <= taken.samples or samples % taken.samples:
        return graph
    return micro(graph, samples // taken.samples)


def cluster_for(plan: Planned, cluster: Cluster | str | None) -> Cluster:
    """The cluster of a plan: given, remembered, or the one its account names."""
    if isinstance(cluster, str):
        return Cluster.load(cluster) if cluster.endswith(".json") else Cluster.preset(cluster)
    if cluster is not None:
        return cluster
    if plan.origin is not None:
        return plan.origin.cluster
    named = cluster_named(plan)
    if named is None:
        raise PlanError(
            "this plan does not say which cluster it is for", next='hand one over: cluster="8xh100", or --cluster'
        )
    return cluster_for(plan, named)


def cluster_named(plan: Planned) -> str | None:
    """The file or the name of the cluster that a plan's account names."""
    account = plan.account
    return account.cluster_file or (account.step.cluster if account.step else None) or None
