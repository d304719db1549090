"""What an exchange costs on nodes with fast links inside and slower ones between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_acco.cost_model import Costs, Link


@dataclass(frozen=True)
class Cluster:
    """Data-parallel ranks on nodes.

    Attributes:
        ranks: in all; a multiple of `per_node`, or no more than it.
        per_node: ranks of a node.
        inside: link of a rank to others of its node.
        between: link of a *node* to the others; its ranks share it.
        hierarchical: exchange inside every node first, in the place of one ring through all ranks, NCCL's usual way.
    """

    ranks: int
    per_node: int
    inside: Link
    between: Link
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.ranks > self.per_node and self.ranks % self.per_node:
            raise ValueError(f"{self.ranks} ranks do not fill nodes of {self.per_node}")

    def one_pass(self, size: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of `size` bytes."""
        return self._by_levels(size) if self.hierarchical else self._ring(size)

    def costs(self, parameters: float, wire_bytes: int, weight_bytes: int, compute: float) -> Costs:
        """Of an exchange of that many parameters on each rank; ZeRO-1's all-reduce is two passes over the gradients.

        Args:
            wire_bytes: of a gradient element as it travels.
            weight_bytes: of a weight.
            compute: seconds of a micro-batch.
        """
        scatter, gather = self.one_pass(parameters * wire_bytes), self.one_pass(parameters * weight_bytes)
        return Costs(compute, scatter + gather, reduction=2.0 * scatter, gathering=gather)

    def inside_costs(self, parameters: float, wire_bytes: int, weight_bytes: int) -> float:
        """Seconds of an exchange among the ranks of every node by themselves; arguments as for `costs`."""
        own = replace(self, ranks=self.ranks // self._nodes)
        return own.one_pass(parameters * wire_bytes) + own.one_pass(parameters * weight_bytes)

    @property
    def _nodes(self) -> int:
        return max(1, self.ranks // self.per_node)

    def _ring(self, size: float) -> float:
        """One ring through all ranks, node by node: it enters and leaves each node once, so every byte crosses the
        slowest link; a chunk makes ranks - 1 hops, nodes - 1 of them between nodes."""
        if self.ranks == 1:
            return 0.0
        nodes = self._nodes
        # A node of one rank has no link inside.
        slowest = self.inside if nodes == 1 else self.between
        if nodes > 1 and self.per_node > 1:
            slowest = min(self.inside, self.between, key=lambda link: link.bandwidth)
        hops = (self.ranks - nodes) * self.inside.latency + (nodes - 1) * self.between.latency
        return (self.ranks - 1) / self.ranks * size / slowest.bandwidth + hops

    def _by_levels(self, size: float) -> float:
        """Inside every node first, then each rank its share with the ranks in its place on the other nodes."""
        nodes, inner = self._nodes, self.ranks // self._nodes
        inside = (inner - 1) / inner * size / self.inside.bandwidth + (inner - 1) * self.inside.latency
        return inside + (nodes - 1) / nodes * size / self.between.bandwidth + (nodes - 1) * self.between.latency
