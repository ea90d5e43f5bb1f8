"""Every setting of a run: typed, documented under each field, checked before anything starts.

``Config.load(file, overrides)`` is the door. Importing this package needs neither torch nor a GPU.
"""

from .root import Config, Role
from .schema import ConfigError

__all__ = ["Config", "ConfigError", "Role"]
