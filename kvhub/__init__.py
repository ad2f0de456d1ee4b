"""Fit, package and export linear maps from one model's KV cache into another's.

The names below are loaded on first use, so that `import kvhub` needs neither torch nor
transformers. Modules are nouns and functions verbs (`kvhub.calibration.calibrate`), because a
module named like a function would hide it here.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhub.alignment import align
    from kvhub.calibration import calibrate
    from kvhub.compatibility import Decision, check_pair, compare_pair
    from kvhub.conversation import Conversation
    from kvhub.evaluation import evaluate
    from kvhub.generation import handoff
    from kvhub.mapper import KVMapper
    from kvhub.mapper_config import MapperConfig
    from kvhub.policy import Policy
    from kvhub.prior import refit
    from kvhub.report import Report
    from kvhub.ridge import fit
    from kvhub.selection import Selection, select_layers
    from kvhub.spec import ModelSpec, RopeSpec
    from kvhub.stats import Statistics

__version__ = version("kvhub")

_HOME_OF = {
    "Conversation": "conversation",
    "Decision": "compatibility",
    "KVMapper": "mapper",
    "MapperConfig": "mapper_config",
    "ModelSpec": "spec",
    "Policy": "policy",
    "Report": "report",
    "RopeSpec": "spec",
    "Selection": "selection",
    "Statistics": "stats",
    "align": "alignment",
    "calibrate": "calibration",
    "check_pair": "compatibility",
    "compare_pair": "compatibility",
    "evaluate": "evaluation",
    "fit": "ridge",
    "handoff": "generation",
    "refit": "prior",
    "select_layers": "selection",
}

__all__ = [
    "Conversation",
    "Decision",
    "KVMapper",
    "MapperConfig",
    "ModelSpec",
    "Policy",
    "Report",
    "RopeSpec",
    "Selection",
    "Statistics",
    "__version__",
    "align",
    "calibrate",
    "check_pair",
    "compare_pair",
    "evaluate",
    "fit",
    "handoff",
    "refit",
    "select_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'kvhub' has no attribute {name!r}")
    value = getattr(import_module(f"kvhub.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
