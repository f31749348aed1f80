"""Training jobs for mixed-GPU clusters, workstations and time-limited sessions."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainyard.api import Run, load_model, run
    from trainyard.errors import UserError

__version__ = "0.1.0"
__all__ = ["Run", "UserError", "__version__", "load_model", "run"]


def __getattr__(name: str) -> Any:
    """Load the rest only when it is asked for: each command imports this package."""
    if name not in __all__:
        raise AttributeError(f"module 'trainyard' has no attribute '{name}'. It has: {', '.join(__all__)}")
    from trainyard import api

    return getattr(api, name)
