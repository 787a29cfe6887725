"""An Axolotl plugin:

    plugins: [zinf.integrations.axolotl.ZinfPlugin]
    zinf: {nvme_path: /mnt/nvme, host_memory: 48GiB}        # or a YAML file

Axolotl loads a plugin by its dotted path, merges the fields of `get_input_args` into its config, and calls `pre_model_load(cfg)` before anything is
built; from then on its trainers (SFT, and those of its reinforcement learning) train on an engine. Axolotl loads the model itself, so that has to fit
in host memory while it is loaded.

This is tested against a recorded interface, that of axolotl/integrations/base.py, as Axolotl itself is not installed in zinf's tests.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from zinf.errors import ConfigError
from zinf.hf.arguments import config_of

try:
    from axolotl.integrations.base import BasePlugin  # type: ignore[import-not-found]
except ImportError:
    BasePlugin = object


class ZinfArgs(BaseModel):
    """What the plugin adds to Axolotl's config."""

    zinf: dict[str, Any] | str | None = None


class ZinfPlugin(BasePlugin):
    """Lets Axolotl train on zinf."""

    def get_input_args(self) -> str:
        """The dotted path of ZinfArgs."""
        return f"{__name__}.{ZinfArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        """Check the options, and let trainers be built on an engine.

        Raises:
            ConfigError: an option is wrong, or cfg asks for what zinf cannot do.
        """
        from transformers import Trainer

        from zinf.integrations.trainers import install

        for key in ("load_in_8bit", "load_in_4bit", "gptq", "deepspeed", "fsdp", "fsdp_config"):
            if _get(cfg, key):
                raise ConfigError(f"{key} is set, and zinf streams weights of 16 or 32 bits through one card: leave it out")
        options = _get(cfg, "zinf")
        config_of(options if isinstance(options, str) else dict(options or {}))
        install(Trainer, options)

    def post_train(self, cfg: Any, model: Any) -> None:
        """Commit what is pending, so that the store is at the last step whatever follows."""
        engine = getattr(model, "zinf_engine", None)
        if engine is not None and engine() is not None:
            engine().synchronize()


def _get(cfg: Any, key: str) -> Any:
    return cfg.get(key) if hasattr(cfg, "get") else getattr(cfg, key, None)
