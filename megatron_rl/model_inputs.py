"""The folders of a run's models: found or fetched, and checked against what a run needs of them."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import Config, ConfigError
from megatron_rl.convert.kinds import open_model
from megatron_rl.convert.model_folder import ModelFolder
from megatron_rl.hub import Named, model_folder
from megatron_rl.once_per_node import NodeRank


def roles_of(config: Config) -> list[str]:
    """The roles that this run has a model for."""
    roles = ["actor"]
    roles += ["critic"] if config.has_critic else []
    roles += ["reference"] if config.has_reference else []
    roles += ["reward"] if config.has_learned_reward else []
    return roles


def model_folders(config: Config, node: NodeRank) -> dict[str, Path]:
    """Role → local folder of its weights; a hub id is fetched once for all roles that name it.

    Raises:
        ConfigError: there is no such folder, and it can't be fetched.
    """
    found: dict[tuple[str, str | None], Path] = {}
    folders = {}
    for role in roles_of(config):
        named = _named(config, role)
        key = named.name, named.revision
        if key not in found:
            trust = config.model.trust_remote_code
            found[key] = model_folder(named, node, trust_remote_code=trust)
        folders[role] = found[key]
    return folders


def _named(config: Config, role: str) -> Named:
    """What the role's weights are called; a role without a path of its own has the actor's."""
    owner = "actor" if config.role(role).path is None else role
    path = config.role_path(role)
    if path is None:
        raise ConfigError(
            f"model.{role}.path is null: give a model folder or a hub id (owner/name)",
            setting=f"model.{role}.path",
        )
    return Named(
        name=path, revision=config.role_revision(role), setting=f"model.{owner}.path",
        revision_setting=f"model.{owner}.revision",
    )  # fmt: skip


def read_model(config: Config, role: str, folder: Path) -> ModelFolder:
    """A model's folder, of any kind, whose files hold all that it needs under the role's layout.

    Reads the headers of the weights only, so that a file which is missing, cut short or another
    model's ends the run before any memory is used for it.

    Raises:
        ConfigError: naming what does not fit.
    """
    layout = config.role_parallel(role)
    try:
        model = open_model(folder, role, full_precision=config.training.dtype == "fp32")
        model.architecture.check_layout(
            tp=layout.tp, pp=layout.pp, vpp=layout.vpp, ep=layout.ep,
            name=f"the {role} ({folder})",
        )
        model.check()
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError) and error.setting:
            raise
        setting = f"model.{role}.path"
        raise ConfigError(f"{setting}: {error}", setting=setting) from error
    return model
