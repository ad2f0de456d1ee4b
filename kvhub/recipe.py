"""The built-in pairs: which models, how they are calibrated and fitted, and what is known of them.

Each is one TOML file in `kvhub/recipes`, named like the recipe.
"""

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from kvhub.errors import NotFoundError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Recipe", "list_recipes", "load_recipe", "locate_model"]

_FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """How to make one mapper.

    Attributes
    ----------
    name
        What users type: `kvhub fit NAME`.
    source, target
        Model ids on the Hub; for a local recipe paths, see `locate_models`.
    top_k
        Source layers per target layer.
    data, sequences, length
        Calibration text as in `kvhub.data.token_batches`.
    note
        Where the recipe comes from and what is published or known about it.
    heads, ridge_lambda, lambda_scale
        As in `kvhub.ridge.fit`.
    stride
        Every how many tokens one enters the statistics.
    obtain
        How to get the models if they are not on the Hub; empty if they are.
    """

    name: str
    source: str
    target: str
    top_k: int
    data: str
    sequences: int
    length: int
    note: str
    heads: Literal["all", "matched"] = "all"
    ridge_lambda: float = 1e-3
    lambda_scale: Literal["relative", "per_token", "absolute"] = "relative"
    stride: int = 1
    obtain: str = ""

    @property
    def local(self) -> bool:
        """Whether the models are folders on this machine, not ids on the Hub."""
        return bool(self.obtain)

    def locate_models(self) -> tuple[str, str]:
        """Find both models: what to pass to `from_pretrained` as source and as target.

        Raises
        ------
        NotFoundError
            A local model is in none of the places where `locate_model` looks.
        """
        found = (locate_model(self.source), locate_model(self.target))
        for model, path in zip((self.source, self.target), found, strict=True):
            if self.local and not (Path(path) / "config.json").is_file():
                raise NotFoundError(
                    f"The recipe {self.name} needs the model {model}, found none in {Path.cwd()}.",
                    self.obtain,
                )
        return found


def locate_model(model: str) -> str:
    """Where a model is: a folder of that path, seen from here or from the checkout, or itself.

    The checkout is the one that this package was installed from in editable mode. So the embedded
    models can be named by one path wherever the command is run.
    """
    checkout = Path(__file__).resolve().parent.parent
    for path in (Path(model), checkout / model):
        if (path / "config.json").is_file():
            return str(path)
    return model


def load_recipe(name: str) -> Recipe:
    """Read one built-in recipe.

    Raises
    ------
    NotFoundError
        If there is none of that name.
    """
    paths = {path.stem: path for path in _FOLDER.glob("*.toml")}
    if name not in paths:
        close = get_close_matches(name.lower(), paths, n=1)
        raise NotFoundError(
            f"There is no recipe {name!r}; there are {', '.join(sorted(paths))}.",
            f"Did you mean {close[0]}?" if close else "Run kvhub recipes to see them all.",
        )
    return Recipe(name=name, **tomllib.loads(paths[name].read_text(encoding="utf-8")))


def list_recipes() -> list[Recipe]:
    """Read every built-in recipe, in the order of their names."""
    return [load_recipe(name) for name in sorted(path.stem for path in _FOLDER.glob("*.toml"))]
