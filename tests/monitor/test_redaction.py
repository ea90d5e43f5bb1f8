"""Layer: pure. No secret of the environment, the command or the settings is written down."""

from __future__ import annotations

import json
import secrets
import string

import pytest

from megatron_rl.monitor.redaction import REDACTED, redact, redact_command, redact_text

SECRET = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(36))


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "api_key",
     "DB_PASSWORD", "SSH_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS", "GITHUB_PAT",
     "AWS_SESSION_TOKEN", "HTTP_AUTHORIZATION", "NPM_AUTH", "PRIVATE_KEY", "COOKIE", "key",
     "SOME_KEY"],
)  # fmt: skip
def test_values_with_a_secret_name_are_hidden(name):
    assert redact({name: SECRET}) == {name: REDACTED}
    assert redact({"reward": {"kwargs": {name: [SECRET]}}})["reward"]["kwargs"][name] == [REDACTED]
    assert redact_command(["train_ppo.py", f"reward.kwargs.{name}={SECRET}"])[1] == (
        f"reward.kwargs.{name}={REDACTED}"
    )


@pytest.mark.parametrize(
    "value",
    [f"hf_{SECRET}", f"ghp_{SECRET}", f"github_pat_{SECRET}", f"glpat-{SECRET}", f"sk-{SECRET}",
     "AKIA" + "Z7" * 8, f"eyJ{SECRET}.eyJ{SECRET}.{SECRET}",
     f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
     f"https://me:{SECRET}@proxy.example:8080/path"],
)  # fmt: skip
def test_values_that_look_like_secrets_are_hidden_under_any_name(value):
    shown = json.dumps([redact({"X": f"a {value}"}), redact_command(["run", value])])
    assert SECRET not in shown and "Z7Z7" not in shown and shown.count(REDACTED) == 2
    assert SECRET not in redact_text(f"+ token = {value!r}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("PATH", "/usr/bin:/bin"), ("model.tokenizer.path", "models/x"), ("max_new_tokens", 512),
     ("training.max_tokens_per_micro_batch", 16384), ("rollout.stop_token_ids", [1, 2]),
     ("model.tokenizer.eos_token", "</s>"), ("NCCL_DEBUG", "INFO"), ("data.prompt_key", "question"),
     ("TOKENIZERS_PARALLELISM", "false"), ("XAUTHORITY_FREE", "x"), ("a", None), ("b", True)],
)  # fmt: skip
def test_ordinary_settings_stay_as_they_are(name, value):
    assert redact({name: value}) == {name: value}
