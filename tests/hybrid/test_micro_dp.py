"""Layer: gloo ranks. PPO with a generation layout of its own equals PPO without."""

from __future__ import annotations

import pytest

from tests.hybrid import transition_case as case
from tests.trainer import run_case

MEASURED = ("perf/", "spread/", "throughput/", "memory/", "mfu/", "hardware/")
FAST, SLOW = [], [pytest.mark.slow]
CASES = {
    "tp2_to_1": (2, "llama", dict(tp=2), (1, 1), FAST),
    "pp2_to_1_tied": (2, "llama_tied", dict(pp=2), (1, 1), SLOW),
    "padded_heads_and_vocabulary": (2, "llama_padded_heads", dict(tp=2, sp=True), (1, 1), SLOW),
    "tp2_pp2_to_1_qkv_bias_tied": (4, "qwen2", dict(tp=2, pp=2), (1, 1), SLOW),
    "tp2_pp2_to_tp2_qk_norm": (4, "qwen3", dict(tp=2, pp=2), (2, 1), SLOW),
    "tp2_pp2_to_pp2_tied": (4, "llama_tied", dict(tp=2, pp=2), (1, 2), SLOW),
    "fewer_kv_heads_than_ranks": (2, "llama_one_kv_head", dict(tp=2), (1, 1), SLOW),
    "tp4_to_2_fewer_kv_heads": (4, "llama", dict(tp=4), (2, 1), SLOW),
    "pp2_vpp2_to_1": (2, "llama", dict(pp=2, vpp=2), (1, 1), SLOW),
    "tp2_dp2_to_1": (4, "llama", dict(tp=2), (1, 1), SLOW),
}  # fmt: skip


def hybrid(generation: tuple[int, int], **changes) -> dict:
    tp, pp = generation
    return {"mode": "micro_dp", "generation_tp": tp, "generation_pp": pp, **changes}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=CASES[n][-1]) for n in CASES],
)  # fmt: skip
def test_ppo_is_the_same_in_both_modes(ranks, tiny_model, tmp_path, name):
    """Same tokens, same metrics, same weights to the bit; the published volume on the wire."""
    world, model, parallel, generation, _ = CASES[name]
    folder, keep = str(tiny_model(model)), name == "tp2_to_1"
    # transformers' Qwen tokenizer would add a token of its own.
    options = dict(parallel=parallel, model__tokenizer={"path": str(tiny_model("llama"))})
    plain = run_case.settings(folder, tmp_path / "a", **options)
    other = run_case.settings(
        folder, tmp_path / "b", **options,
        hybrid_engine=hybrid(generation, keep_generation_weights=keep),
    )  # fmt: skip
    want = ranks(world, case.run, plain, 2)
    got = ranks(world, case.run, other, 2, True)
    for rank in range(world):
        assert got[rank]["sequences"] == want[rank]["sequences"], f"rank {rank}: other tokens"
        for step in range(2):
            compare(got[rank]["metrics"][step], want[rank]["metrics"][step])
        check_transitions(got[rank], keep, in_place=name.startswith("pp2"))


def compare(got: dict, want: dict) -> None:
    names = {n for n in want if not n.startswith(MEASURED)}
    assert names == {n for n in got if not n.startswith(MEASURED)}, "other metrics"
    assert got["drift/max_abs"] < 1e-4, "logits of the generation layout differ"
    for name in names:
        if not name.startswith("drift/"):
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), name


def check_transitions(result: dict, keep: bool, in_place: bool) -> None:
    """M/(t_g·p_g) − M/(tp) more where only stages are merged, never more than M/(t_g·p_g)."""
    planned = result["planned"]
    allowed = planned["generation"] - (planned["training"] if in_place else 0)
    for seen in result["seen"]:
        assert seen["received"] == planned["received"] > 0
        assert seen["before"] == seen["after"], "training weights changed"
        assert seen["in_place"] > 0, "nothing is used in place"
        assert seen["beyond"] == seen["extra"]
        assert seen["extra"] <= allowed + 256 * planned["tensors"]
        assert seen["held"] == (seen["extra"] if keep else 0)
