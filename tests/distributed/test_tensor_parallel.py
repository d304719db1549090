"""Tensor parallelism on real gloo ranks: the same weights and samples must give what one rank per replica gives.

Covers CASES B05 (tied embedding, recomputation), B14 (norm over tensor-parallel ranks, replicated parameters once),
B15 (gradients of replicated parameters under sequence parallelism), B16 and B18 for one tensor-parallel rank, and the
dropout rules behind B38. Layouts: 2 x 2 (tensor x data), 2 x 1; the reference is 1 x 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed import gpt
from tests.distributed.gpt import Case, Outcome, whole

NORM_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
References = Callable[[Case], list[Outcome]]


@pytest.fixture(scope="module")
def reference(ranks: Callable) -> References:
    """Outcomes of a case on one rank per replica, trained once each."""
    known: dict[str, list[Outcome]] = {}

    def of(case: Case) -> list[Outcome]:
        plain = replace(case, tp=1, sequence_parallel=False)
        if repr(plain) not in known:
            known[repr(plain)] = ranks(gpt.REPLICAS).run(gpt.train, plain)
        return known[repr(plain)]

    return of


def check_agreement(got: list[Outcome], want: list[Outcome]) -> None:
    """Copies bit-identical over all ranks; weights and norms as the reference has them."""
    for which, tolerance in (("initial", 0.0), ("weights", WEIGHT_TOLERANCE)):
        ours, theirs = whole(got, which), whole(want, which)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert float((ours[name] - theirs[name]).abs().max()) <= tolerance, (which, name)
    # The clipping coefficient is a function of the norm, which must therefore be the same number everywhere.
    assert all(outcome.norms == got[0].norms for outcome in got)
    assert len(got[0].norms) == len(want[0].norms) > 0
    for ours, theirs in zip(got[0].norms, want[0].norms, strict=True):
        assert ours == pytest.approx(theirs, rel=NORM_TOLERANCE)


LAYOUTS = [(4, False), (4, True), (2, False), (2, True)]


@pytest.mark.parametrize("style", gpt.STYLES)
@pytest.mark.parametrize(("world", "sequence_parallel"), LAYOUTS, ids=["2x2", "2x2-sp", "2x1", "2x1-sp"])
def test_norms_and_weights_are_those_of_one_rank_per_replica(
    ranks: Callable, reference: References, style: str, world: int, sequence_parallel: bool
) -> None:
    """GPT-2 style: tied, biases, LayerNorm; Llama style: untied, grouped queries, SwiGLU, RMSNorm on queries too."""
    case = Case(style, tp=2, sequence_parallel=sequence_parallel)
    got = ranks(world).run(gpt.train, case)
    check_agreement(got, reference(case))
    copied = {name for name, split in got[0].split.items() if split is None}
    assert any("layernorm" in name for name in copied) and not any("word_embeddings" in name for name in copied)
    assert ("decoder.layers.0.self_attention.q_layernorm.weight" in copied) == (style == "llama")
    # Not a comparison of runs in which nothing happens: it clips, and the norms' weights move.
    assert min(got[0].norms) > gpt.CLIP
    norm = "decoder.final_layernorm.weight"
    assert float((got[0].weights[norm] - got[0].initial[norm]).abs().max()) > 100 * WEIGHT_TOLERANCE


@pytest.mark.parametrize("style", gpt.STYLES)
def test_deepspeeds_own_zero1_agrees_too(ranks: Callable, reference: References, style: str) -> None:
    """The baseline sums the partial gradients of replicated parameters in backward."""
    case = Case(style, tp=2, sequence_parallel=True, mode=None, updates=5)
    check_agreement(ranks(2).run(gpt.train, case), reference(case))


def test_bf16_copies_stay_equal(ranks: Callable, reference: References) -> None:
    case = Case(tp=2, sequence_parallel=True, bf16=True, updates=5)
    got = ranks(2).run(gpt.train, case)
    whole(got)
    assert got[0].losses[-8:] == pytest.approx(got[1].losses[-8:])
    assert got[0].norms[0] == pytest.approx(reference(case)[0].norms[0], rel=0.02)


@pytest.mark.parametrize("micro", [0, 3], ids=["first half", "second half"])
def test_nan_on_one_tensor_parallel_rank_skips_the_update_everywhere(ranks: Callable, micro: int) -> None:
    clean, poisoned = (ranks(4).run(gpt.train, Case(tp=2, updates=2, poison=poison)) for poison in (None, (1, micro)))
    for before, after in zip(clean, poisoned, strict=True):
        assert (before.skipped, after.skipped) == (0, 1)
        # The estimate of the second update is skipped if its own half is bad; its commit in both cases.
        assert after.applied == [True, True, micro != 0, False]
    # theta after the skipped update is theta before it.
    first = whole(ranks(4).run(gpt.train, Case(tp=2, updates=1)))
    assert all(torch.equal(value, first[name]) for name, value in whole(poisoned).items())


@pytest.mark.parametrize("micro", [0, 3], ids=["first half", "second half"])
def test_fp16_overflow_on_one_tensor_parallel_rank_lowers_the_scale_once_everywhere(
    ranks: Callable, micro: int
) -> None:
    case = Case(tp=2, fp16=True, updates=3, poison=(1, micro))
    outcomes = ranks(4).run(gpt.train, case)
    for outcome in outcomes:
        assert outcome.skipped == 1
        assert outcome.applied == [True, True, micro != 0, False, True, True]
        # The commit of update 1 is settled at the half boundary of update 2; a half has one scale.
        assert outcome.scales == [256.0] * 2 * gpt.GAS + [256.0] * (gpt.GAS // 2) + [128.0] * (gpt.GAS // 2)
    whole(outcomes)


# ---- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_dropout_follows_megatrons_rules(ranks: Callable, sequence_parallel: bool) -> None:
    """Heads, and parts of a sequence, are dropped differently on each rank; what all ranks hold, equally."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, dropout=0.5)
    seen = {(r["tp"], r["dp"]): r for r in ranks(4).run(gpt.dropout_masks, case)}
    for dp in range(2):
        one, other = seen[0, dp], seen[1, dp]
        assert not torch.equal(one["attention"], other["attention"])
        assert torch.equal(dropped(one), dropped(other)) == (not sequence_parallel)
        assert one["default"] == other["default"]
    # Replicas draw different numbers, and a rank draws the same ones every time.
    for tp in range(2):
        assert not torch.equal(dropped(seen[tp, 0]), dropped(seen[tp, 1]))
        assert not torch.equal(seen[tp, 0]["attention"], seen[tp, 1]["attention"])
    assert not torch.equal(seen[0, 1]["attention"], seen[1, 0]["attention"])
    again = {(r["tp"], r["dp"]): r for r in ranks(4).run(gpt.dropout_masks, case)}
    assert all(torch.equal(seen[key]["attention"], again[key]["attention"]) for key in seen)


def dropped(seen: dict[str, Any]) -> torch.Tensor:
    return seen["embedding"] == 0.0


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective"},
}


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_recomputation_changes_no_bit(
    ranks: Callable, reference: References, recomputed: str, sequence_parallel: bool
) -> None:
    """With dropout: a recomputed segment must draw what it drew in the forward pass, from every stream."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, dropout=0.2, updates=3)
    plain = ranks(2).run(gpt.train, case)
    again = ranks(2).run(gpt.train, replace(case, options=RECOMPUTED[recomputed]))
    for one, other in zip(plain, again, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        assert all(math.isfinite(loss) for loss in one.losses)
    first, second = whole(plain), whole(again)
    assert all(torch.equal(first[name], second[name]) for name in first)
