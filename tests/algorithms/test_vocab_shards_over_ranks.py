"""Ranks layer: everything computed on vocabulary shards equals the whole vocabulary, in float64."""

import pytest
import torch
import torch.distributed as dist

from megatron_rl.algorithms.logprobs import shard_logsumexp, vocab_parallel_logprobs
from megatron_rl.algorithms.truncation import truncation_threshold_T
from megatron_rl.algorithms.vocab_kl import vocab_parallel_kl

pytestmark = pytest.mark.ranks

TOKENS, VOCAB, PADDED = 6, 9, 16  # over 4 ranks the last shard is all padding


def draw(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def layout(rank, world_size):
    width = PADDED // world_size
    return slice(rank * width, (rank + 1) * width), {
        "group": dist.group.WORLD,
        "vocab_start": rank * width,
        "vocab_size": VOCAB,
        "padded_vocab_size": PADDED,
    }


def logprobs_and_gradients(rank, world_size, seed, temperature, min_logit):
    mine, shard = layout(rank, world_size)
    x = draw(seed, TOKENS, PADDED)[:, mine].clone().requires_grad_()
    labels = torch.tensor([0, 8, 3, 4, -1, 7])
    min_logit = None if min_logit is None else torch.full((TOKENS,), min_logit).double()
    logp, entropy = vocab_parallel_logprobs(
        x,
        labels,
        **shard,
        temperature=temperature,
        chunk=4,
        with_entropy=True,
        min_logit_T=min_logit,
    )
    weights = draw(seed + 1, 2, TOKENS)
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    return [t.detach().numpy() for t in (logp, entropy, x.grad)]


def dense(seed, temperature, min_logit):
    x = draw(seed, TOKENS, PADDED).requires_grad_()
    labels = torch.tensor([0, 8, 3, 4, -1, 7])
    target = labels.clamp_min(0)
    kept = torch.ones(TOKENS, VOCAB, dtype=torch.bool)
    if min_logit is not None:
        kept = x[:, :VOCAB] >= min_logit
        kept[torch.arange(TOKENS), target] |= labels >= 0
    logp_all = (x[:, :VOCAB] / temperature).masked_fill(~kept, -1e300).log_softmax(-1)
    logp = torch.where(labels >= 0, logp_all.gather(1, target[:, None])[:, 0], 0.0)
    entropy = -(logp_all.exp() * logp_all.clamp_min(-1e100)).sum(-1)
    weights = draw(seed + 1, 2, TOKENS)
    (weights[0] * logp + weights[1] * entropy).sum().backward()
    return [t.detach() for t in (logp, entropy, x.grad)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("temperature", "min_logit"), [(1.0, None), (0.6, None), (1.3, -0.2)])
def test_logprobs_entropy_and_gradients_equal_dense(ranks, world_size, temperature, min_logit):
    seed = 17 + world_size
    results = ranks(world_size, logprobs_and_gradients, seed, temperature, min_logit)
    logp, entropy, grad = dense(seed, temperature, min_logit)
    for result in results:
        torch.testing.assert_close(torch.from_numpy(result[0]), logp, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(torch.from_numpy(result[1]), entropy, atol=1e-12, rtol=1e-12)
    gathered = torch.cat([torch.from_numpy(result[2]) for result in results], dim=1)
    torch.testing.assert_close(gathered, grad, atol=1e-12, rtol=1e-12)


def worst_numeric_gradient_error(rank, world_size):
    """Central differences of one global logit at a time, its owner moves it, all recompute."""
    mine, shard = layout(rank, world_size)
    x = draw(3, 2, PADDED)[:, mine].clone()
    labels = torch.tensor([1, 8])
    weights = draw(4, 2, 2)

    def loss(x):
        logp, entropy = vocab_parallel_logprobs(
            x, labels, **shard, temperature=0.8, with_entropy=True
        )
        return (weights[0] * logp + weights[1] * entropy).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    worst, step, width = 0.0, 1e-6, x.shape[1]
    for row in range(2):
        for token in range(PADDED):
            owner, column = divmod(token, width)
            losses = []
            for sign in (1, -1):
                moved = x.clone()
                if owner == rank:
                    moved[row, column] += sign * step
                losses.append(loss(moved).item())
            if owner == rank:
                numeric = (losses[0] - losses[1]) / (2 * step)
                worst = max(worst, abs(numeric - leaf.grad[row, column].item()))
    return worst


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_equal_numeric_differences_across_ranks(ranks, world_size):
    assert max(ranks(world_size, worst_numeric_gradient_error)) < 1e-8


def bytes_sent(rank, world_size, with_entropy, tokens):
    """Bytes handed to collectives, forward and backward; any collective but all-reduce fails."""
    mine, shard = layout(rank, world_size)
    sizes, real = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.numel() * tensor.element_size())
        return real(tensor, *args, **kwargs)

    def refuse(*args, **kwargs):
        raise AssertionError("only all-reduces are expected here")

    others = ("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "reduce")
    kept = {name: getattr(dist, name) for name in others}
    dist.all_reduce = counting
    for name in others:
        setattr(dist, name, refuse)
    try:
        x = draw(1, tokens, PADDED)[:, mine].float().requires_grad_()
        labels = torch.arange(tokens) % VOCAB
        out = vocab_parallel_logprobs(x, labels, **shard, chunk=3, with_entropy=with_entropy)
        sum(o.sum() for o in out).backward()
    finally:
        dist.all_reduce = real
        for name, function in kept.items():
            setattr(dist, name, function)
    return sizes


@pytest.mark.parametrize(("with_entropy", "numbers"), [(False, 3), (True, 4)])
def test_wire_carries_a_few_numbers_per_token_and_never_the_vocabulary(
    ranks, with_entropy, numbers
):
    for tokens in (5, 40):
        for sizes in ranks(2, bytes_sent, with_entropy, tokens):
            assert len(sizes) == 2 and sum(sizes) == numbers * 4 * tokens


def refusal_of_gathered_logits(rank, world_size, padded):
    whole = torch.tensor([[0.0, 1, 2, 3]])
    try:
        vocab_parallel_logprobs(
            whole,
            torch.tensor([3]),
            group=dist.group.WORLD,
            vocab_start=rank * 2,
            vocab_size=4,
            padded_vocab_size=padded,
        )
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("padded", [None, 4])
def test_gathered_logits_are_refused_on_every_rank(ranks, padded):
    for message in ranks(2, refusal_of_gathered_logits, padded):
        assert "never gathered logits" in message


def golden_on_two_shards(rank, world_size):
    x = torch.tensor([[0.0, 1, 2, 3]])[:, 2 * rank : 2 * rank + 2]
    shard = {"group": dist.group.WORLD, "vocab_start": 2 * rank, "vocab_size": 4}
    logp, entropy = vocab_parallel_logprobs(x, torch.tensor([3]), **shard, with_entropy=True)
    return logp.item(), entropy.item(), shard_logsumexp(x, **shard).item()


def test_golden_shards_equal_the_whole(ranks):
    for logp, entropy, logsumexp in ranks(2, golden_on_two_shards):
        assert logp == pytest.approx(-0.4401897, abs=1e-6)
        assert entropy == pytest.approx(0.9475370, abs=1e-6)
        assert logsumexp == pytest.approx(3.4401897, abs=1e-6)


def kl_and_gradient(rank, world_size):
    mine, shard = layout(rank, world_size)
    x = draw(5, TOKENS, PADDED)[:, mine].clone().requires_grad_()
    ref = draw(6, TOKENS, PADDED)[:, mine].clone()
    kl = vocab_parallel_kl(x, ref, **shard, temperature=0.7, chunk=4)
    (kl * draw(7, TOKENS)).sum().backward()
    return kl.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_full_kl_equals_dense(ranks, world_size):
    results = ranks(world_size, kl_and_gradient)
    x, ref = draw(5, TOKENS, PADDED).requires_grad_(), draw(6, TOKENS, PADDED)
    logp, logq = ((t[:, :VOCAB] / 0.7).log_softmax(-1) for t in (x, ref))
    kl = (logp.exp() * (logp - logq)).sum(-1)
    (kl * draw(7, TOKENS)).sum().backward()
    for result in results:
        torch.testing.assert_close(torch.from_numpy(result[0]), kl.detach(), atol=1e-12, rtol=0)
    gathered = torch.cat([torch.from_numpy(grad) for _, grad in results], dim=1)
    torch.testing.assert_close(gathered, x.grad, atol=1e-12, rtol=1e-12)


def thresholds(rank, world_size, top_k, top_p):
    mine, shard = layout(rank, world_size)
    x = (draw(8, 40, PADDED) * 2).round(decimals=0)  # many ties
    x = (x + draw(9, 40, PADDED) * (torch.arange(40) % 2)[:, None]).float()
    group = shard.pop("group")
    return truncation_threshold_T(
        x[:, mine], top_k, top_p, group, **shard, temperature=0.9, chunk=16
    ).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.8), (4, 0.7)])
def test_truncation_does_not_depend_on_the_number_of_shards(ranks, top_k, top_p):
    whole = ranks(1, thresholds, top_k, top_p)[0]
    for world_size in (2, 4):
        for result in ranks(world_size, thresholds, top_k, top_p):
            assert result == whole
