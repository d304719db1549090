"""The GPT model on CPU: attention against the formula, causality, both styles, parameter groups,
recomputation, random-number streams.

Runs in a process group of one rank; covers CASES B05 (tied embedding counted once, recomputation) for the model's side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType

from megatron_acco.training.attention import SdpaCoreAttention
from megatron_acco.training.checkpoint import random_state, set_random_state
from megatron_acco.training.environment import seed_everything
from megatron_acco.training.evaluate import masked_mean
from megatron_acco.training.model import ModelOptions, build_model, parameter_groups

GPT2 = ModelOptions(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16)
LLAMA = ModelOptions(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=16,
    group_query_attention=True,
    num_query_groups=2,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)
STYLES = pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    seed_everything(0)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tokens(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 100, (batch, 16), generator=generator), torch.arange(16).expand(batch, -1)


def core_attention(dropout: float = 0.0, kind: AttnMaskType = AttnMaskType.causal) -> SdpaCoreAttention:
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=dropout, sequence_parallel=False)
    return SdpaCoreAttention(config, 1, kind, "self")  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention_equals_the_formula(groups: int) -> None:
    sequence, batch, heads, size = 6, 3, 4, 8
    query = torch.randn(sequence, batch, heads, size)
    key, value = torch.randn(2, sequence, batch, groups, size)
    result = core_attention()(query, key, value, None)
    assert result.shape == (sequence, batch, heads * size)
    for b in range(batch):
        for head in range(heads):
            k, v = (x[:, b, head * groups // heads] for x in (key, value))
            scores = query[:, b, head] @ k.T / math.sqrt(size)
            scores = scores.masked_fill(torch.ones(sequence, sequence).triu(1).bool(), float("-inf"))
            expected = scores.softmax(dim=-1) @ v
            torch.testing.assert_close(result[:, b, head * size : (head + 1) * size], expected)


def test_attention_dropout_is_for_training_only() -> None:
    attention = core_attention(dropout=0.5)
    query, key, value = torch.randn(3, 6, 1, 2, 8)
    assert not torch.equal(attention(query, key, value, None), attention(query, key, value, None))
    attention.eval()
    assert torch.equal(attention(query, key, value, None), attention(query, key, value, None))


@STYLES
def test_no_token_sees_the_future(options: ModelOptions) -> None:
    torch.manual_seed(0)
    model = build_model(options, 128).eval()
    ids, positions = tokens(1)
    changed = ids.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 100
    with torch.no_grad():
        before, after = (model(x, positions, None) for x in (ids, changed))
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@STYLES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_lowers_the_loss(options: ModelOptions, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = build_model(options, 128, dtype).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, positions = tokens()
    losses = []
    for _ in range(8):
        loss = masked_mean(model(ids, positions, None, labels=ids), torch.ones_like(ids))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(128), rel=0.1) and losses[-1] < losses[0] - 0.5


def test_building_a_model_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """megatron-core 0.19 announces the end of GPTModel each time."""
    build_model(GPT2, 128)
    assert "DEPRECATED" not in caplog.text


def test_tied_embedding_is_one_parameter() -> None:
    tied = {name for name, _ in build_model(GPT2, 128).named_parameters()}
    own = {name for name, _ in build_model(LLAMA, 128).named_parameters()}
    assert "output_layer.weight" not in tied and "output_layer.weight" in own


def test_llama_style_has_no_biases_and_no_positions() -> None:
    names = [name for name, _ in build_model(LLAMA, 128).named_parameters()]
    assert not any(name.endswith("bias") or "position" in name for name in names)


@STYLES
def test_biases_and_norms_take_no_weight_decay(options: ModelOptions) -> None:
    model = build_model(options, 128)
    decayed, plain = parameter_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {id(p) for p in decayed["params"]} | {id(p) for p in plain["params"]} == set(names)
    assert all("norm" not in names[id(p)] and "bias" not in names[id(p)] for p in decayed["params"])
    assert all("norm" in names[id(p)] or "bias" in names[id(p)] for p in plain["params"])
    assert (decayed["wd_mult"], plain["wd_mult"]) == (1.0, 0.0)


def test_frozen_parameters_are_in_no_group() -> None:
    model = build_model(GPT2, 128)
    model.embedding.requires_grad_(False)
    grouped = {id(p) for group in parameter_groups(model) for p in group["params"]}
    assert not grouped & {id(p) for p in model.embedding.parameters()}


def test_equal_seeds_give_equal_weights() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        models.append(build_model(GPT2, 128).state_dict())
    assert all(torch.equal(models[0][k], models[1][k]) for k in models[0] if torch.is_tensor(models[0][k]))


RECOMPUTED = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
]
ATTENTIONS = [4, 4, 3, 4, 4]
"""Runs of core attention per forward and backward of two layers; without recomputation there are 2."""


@STYLES
@pytest.mark.parametrize(("recomputed", "attentions"), list(zip(RECOMPUTED, ATTENTIONS, strict=True)))
def test_recomputation_changes_no_bit(
    options: ModelOptions, recomputed: dict[str, Any], attentions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout: what is recomputed must be dropped as it was in the forward pass."""
    calls: list[Any] = []
    forward = SdpaCoreAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SdpaCoreAttention, "forward", counted)
    ids, positions = tokens()

    def run(settings: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
        seed_everything(7)
        model = build_model(dataclasses.replace(options, **settings), 128)
        gradients = []
        for _ in range(2):
            model.zero_grad()
            model(ids, positions, None, labels=ids).mean().backward()
            gradients += [p.grad.clone() for p in model.parameters()]
        return gradients, torch.rand(1)

    wanted, stream = run({})
    assert len(calls) == 4
    calls.clear()
    got, stream_after = run(recomputed)
    assert len(calls) == 2 * attentions and torch.equal(stream, stream_after)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_random_streams_are_apart_and_go_on_where_they_were() -> None:
    seed_everything(3)
    tracker = get_cuda_rng_tracker()
    state = random_state()

    def draw() -> list[float]:
        numbers = [torch.rand(1).item()]
        with tracker.fork():
            numbers += torch.rand(2).tolist()
        numbers += torch.rand(1).tolist()
        with tracker.fork():
            numbers += torch.rand(1).tolist()
        return numbers

    first = draw()
    assert len(set(first)) == 5 and first[::3] == torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
    assert draw() != first
    set_random_state(state)
    assert draw() == first
    with pytest.raises(RuntimeError, match="no random-number stream other"), tracker.fork("other"):
        pass


def test_vocabulary_is_padded_to_a_multiple() -> None:
    assert [GPT2.padded_vocab_size(n) for n in (1, 128, 129)] == [128, 128, 256]
    assert GPT2.padded_vocab_size(129, tensor_parallel_size=2) == 256


def test_mlp_width_follows_megatron() -> None:
    assert GPT2.mlp_width == 128 and LLAMA.mlp_width == 64


def test_masked_mean_leaves_masked_tokens_out() -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 100.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    assert masked_mean(losses, mask).item() == 1.5
    assert masked_mean(losses, torch.zeros_like(mask)).item() == 0.0
