"""What a mapper says about itself: the model card of a package, and its licence."""

from kvhub.cards.card import render_card
from kvhub.cards.licenses import License, stricter_license

__all__ = ["License", "render_card", "stricter_license"]
