"""What a mapper says about itself: the model card of a package."""

from kvhub.cards.card import render_card

__all__ = ["render_card"]
