"""Exchanges really run beside compute, in the engine's own loop (B60, B61)."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.distributed.test_adaptive import slow_exchange
from tests.distributed.training import Net, batch, client_optimizer, drain, engine_for, json_config, parameter_groups

pytestmark = pytest.mark.alone

MICRO_BATCH, EXCHANGE, UPDATES = 0.06, 0.04, 10
"""Seconds of compute of a micro-batch, of which a half has two, and by which each group of an exchange takes longer."""


def lane_and_compute() -> list[Any]:
    """Job: the reports of the rounds of a run whose loop asks for the norm and moves metrics to the host."""
    import megatron_acco

    rank, model = torch.distributed.get_rank(), Net()
    optimizer = client_optimizer("torch_adamw", parameter_groups(model))
    with engine_for(model, json_config("acco", gas=4), optimizer) as (engine, zero):
        slow_exchange(zero, [EXCHANGE])
        model.register_forward_hook(lambda *unused: time.sleep(MICRO_BATCH))
        losses = []
        for update in range(UPDATES):
            for micro in range(4):
                loss = engine(*batch(update, rank, micro))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.get_global_grad_norm()
        drain(engine)
        return megatron_acco.round_reports(engine)


def covered(interval: tuple[float, float], spans: list[tuple[float, float]]) -> float:
    """Seconds of the interval that lie inside spans which do not overlap."""
    return sum(max(0.0, min(interval[1], end) - max(interval[0], start)) for start, end in spans)


def test_B61_exchanges_lie_inside_compute_and_nobody_waits(ranks) -> None:
    for reports in ranks(2).run(lane_and_compute):
        assert len(reports) == 2 * UPDATES
        spans = [span for report in reports for span in report.compute_spans]
        assert len(spans) == 4 * UPDATES
        beside = reports[:-1]  # nothing is computed beside the last one
        lanes = [(report.lane_marks[0], report.lane_marks[-1]) for report in beside]
        total = sum(end - start for start, end in lanes)
        assert total >= 2 * EXCHANGE * len(beside)  # two groups
        assert sum(covered(lane, spans) for lane in lanes) > 0.9 * total
        # B60: the wait is what the log shows, and it is next to nothing where compute takes longer than the exchange.
        assert sum(report.wait_seconds for report in beside) < 0.1 * total
