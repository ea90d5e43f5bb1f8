"""Pure layer: a user's function is found by name, or refused at start with what was expected."""

import textwrap

import pytest
import torch

from megatron_rl.algorithms import plugins
from megatron_rl.algorithms.plugins import (
    ADVANTAGE_FUNCTION_ARGS,
    POLICY_LOSS_FUNCTION_ARGS,
    load_function,
)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        textwrap.dedent(
            """
            SCALE = 3

            def good(logp, weights, temperature=1.0):
                return (weights * logp).sum(), {}

            def anything(**kwargs):
                return kwargs

            def misses_one(logp):
                return logp

            def wants_more(logp, weights, mystery):
                return logp

            def positional(logp, weights, /):
                return logp
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["my_losses:good", "my_losses:anything"])
def test_function_with_the_right_arguments_is_returned(user_module, name):
    function = load_function(name, ("logp", "weights"))
    assert function.__name__ == name.partition(":")[2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_losses:misses_one", r"misses_one\(logp\).*expected def misses_one\(logp, weights\)"),
        ("my_losses:wants_more", "'mystery'.*expected def wants_more"),
        ("my_losses:positional", "expected def positional"),
        ("my_losses:absent", "no function 'absent'"),
        ("my_losses:SCALE", "no function 'SCALE'"),
        ("no_such_module:f", "PYTHONPATH"),
        ("my_losses", r"module:function.*def function\(logp, weights\)"),
        (":f", "module:function"),
        ("my_losses:", "module:function"),
    ],
)
def test_anything_else_is_refused_with_the_expected_signature(user_module, name, message):
    with pytest.raises(ValueError, match=message):
        load_function(name, ("logp", "weights"))


def test_documented_examples_load_and_run(tmp_path, monkeypatch):
    blocks = plugins.__doc__.split("\n\n")
    source = "\n\n".join(textwrap.dedent(b) for b in blocks if b.startswith("    def "))
    (tmp_path / "documented_plugins.py").write_text("import torch\n" + source)
    monkeypatch.syspath_prepend(tmp_path)
    estimate = load_function("documented_plugins:advantages", ADVANTAGE_FUNCTION_ARGS)
    advantages, metrics = estimate(
        scores_B=torch.tensor([1.0, 3.0]),
        rewards_BR=torch.zeros(2, 2),
        values_BR=None,
        mask_BR=torch.tensor([[1, 0], [1, 1]]),
        group_B=torch.tensor([0, 0]),
    )
    assert advantages.tolist() == [[-2.0, 0.0], [0.0, 0.0]] and metrics["best_score"] == 3
    loss_function = load_function("documented_plugins:policy_loss", POLICY_LOSS_FUNCTION_ARGS)
    x = torch.ones(2)
    loss, _ = loss_function(logp=x, old_logp=x, advantages=x, weights=x / 2)
    assert loss.item() == -1.0
