"""Which licence a mapper has, given those of the two models that it is derived from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["License", "stricter_license"]

# Ids of the Hub, the one with the most duties last: apache-2.0 asks for notices of changes too.
PERMISSIVE = (
    *("wtfpl", "unlicense", "cc0-1.0", "zlib", "isc", "mit"),
    *("bsd-2-clause", "bsd", "bsd-3-clause", "apache-2.0"),
)
LLAMA = re.compile(r"llama[- ]?(2|3|4)(\.\d)?", re.IGNORECASE)


@dataclass(frozen=True)
class License:
    """A licence as the Hub's metadata states it.

    Attributes
    ----------
    id
        One of the Hub's identifiers, such as `apache-2.0` or `llama3.1`, or `other`.
    name
        What `other` is.
    links
        Where its text is; of two licences at once, both.
    """

    id: str
    name: str | None = None
    links: tuple[str, ...] = ()

    @classmethod
    def of_model(cls, model_id: str, card: Mapping[str, Any]) -> "License | None":
        """The licence in the metadata of a model's card; None where it does not say one.

        Parameters
        ----------
        model_id
            Whose card it is: a link to a file in its repository is made absolute.
        card
            The metadata, such as `model_info(model_id).card_data.to_dict()`.
        """
        found = card.get("license")
        if not isinstance(found, str) or found.strip().lower() in ("", "unknown"):
            return None
        name, link = card.get("license_name"), card.get("license_link")
        page = f"https://huggingface.co/{model_id}"
        if not isinstance(link, str) or not link.strip():
            link = page
        elif not re.match("https?://", link):
            link = f"{page}/blob/main/{link}"
        license_id = found.strip().lower()
        return cls(license_id, str(name) if name else None, (str(link),))

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name or self.id

    @property
    def llama(self) -> str | None:
        """The version of Llama whose licence it is or includes, such as `3.1`."""
        match = LLAMA.search(self.label)
        return match and match[1] + (match[2] or "")


def stricter_license(first: License | None, second: License | None) -> License | None:
    """What a work derived from two models has to be under.

    The same licence stays; of two permissive ones it is that with more duties; a permissive one
    gives way to any other; and two others hold both, which is `other` with both links. None,
    unknown, where either is unknown.
    """
    if first is None or second is None:
        return None
    # A licence has one text, wherever a model's card links it; what `other` is, the name says.
    if first.label == second.label and (first.label != "other" or first.links == second.links):
        return first
    ranks = [
        PERMISSIVE.index(found.id) if found.id in PERMISSIVE else len(PERMISSIVE)
        for found in (first, second)
    ]
    if min(ranks) < len(PERMISSIVE):
        return first if ranks[0] > ranks[1] else second
    return License("other", f"{first.label} and {second.label}", (*first.links, *second.links))
