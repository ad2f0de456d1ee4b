"""What people wrote into a card, which the next version of the card keeps.

The body between two comments is kvhub's and so are some keys of the metadata; the rest is theirs.
"""

import re
from dataclasses import dataclass, field

import yaml
from kvhub.cards.markdown import fenced

__all__ = ["BEGIN", "END", "OwnText", "read_own_text"]

BEGIN, END = "<!-- kvhub:begin -->", "<!-- kvhub:end -->"
# At the start of a line only: no value in a card stands there, and no mention in a text is one.
MARKER = re.compile(r"^[ \t]*<!--[ \t]*kvhub:(begin|end)[ \t]*-->[ \t]*", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A\s*^---[ \t]*\n(.*?)^---[ \t]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
LOST = "The metadata of this card could not be read; this is what it was:"
# What PyYAML raises, beside its own errors, for text that a tag does not fit or that nests deeply.
YAML_ERRORS = (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@dataclass(frozen=True)
class OwnText:
    """The text above and below kvhub's part of a card, and all keys of its metadata.

    The keys are nodes, which keep how a value was written: `1.10` and `no` do not change.
    """

    above: str = ""
    below: str = ""
    keys: dict[str, tuple[yaml.Node, yaml.Node]] = field(default_factory=dict)

    def strings(self, key: str) -> list[str]:
        """The strings in the list, or the one string, that a key has."""
        if key not in self.keys:
            return []
        value = self.keys[key][1]
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        return [
            node.value
            for node in nodes
            if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null"
        ]

    def other_keys(self, ours: set[str]) -> str:
        """The metadata without some keys, as YAML."""
        pairs = [pair for key, pair in self.keys.items() if key not in ours]
        if not pairs:
            return ""
        node = yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
        return str(yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=10**6))


def read_own_text(card: str | None) -> OwnText:
    """Take a card apart; nothing of it is lost but what is kvhub's beyond doubt.

    Where the comments do not pair up, all of the body counts as the user's and goes below; the
    comments themselves go, so that the next card is whole again.
    """
    body = (card or "").removeprefix("\ufeff").replace("\r\n", "\n")
    keys: dict[str, tuple[yaml.Node, yaml.Node]] | None = {}
    lost = ""
    if match := FRONT_MATTER.match(body):
        body = body[match.end() :]
        keys = _read_keys(match[1])
        if keys is None:
            lost = f"{LOST}\n\n{fenced('yaml', match[1].rstrip())}"
    markers = list(MARKER.finditer(body))
    kinds = [marker[1] for marker in markers]
    if markers and kinds == ["begin", "end"] * (len(markers) // 2):
        above = body[: markers[0].start()]
        # Text between two parts of kvhub's is the user's as well.
        ends = [*(marker.start() for marker in markers[2::2]), len(body)]
        pieces = [body[end.end() : stop] for end, stop in zip(markers[1::2], ends, strict=True)]
    else:
        above, pieces = "", [body]
    return OwnText(_trimmed([above]), _trimmed([*pieces, lost]), keys or {})


def _trimmed(pieces: list[str]) -> str:
    """Join with a blank line between, and none around: what is kept does not grow."""
    text = "\n\n".join(piece.strip("\n") for piece in pieces if piece.strip())
    # Again and again, because behind a comment on the same line there may be the next one.
    while MARKER.search(text):
        text = MARKER.sub("", text).strip("\n")
    return text if text.strip() else ""


def _read_keys(metadata: str) -> dict[str, tuple[yaml.Node, yaml.Node]] | None:
    """Read the top level of YAML metadata; None where it is not what the Hub could read."""
    try:
        node = yaml.compose(metadata, Loader=yaml.SafeLoader)
        yaml.safe_load(metadata)
    except YAML_ERRORS:
        return None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        return None
    if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        return None
    return {key.value: (key, value) for key, value in node.value}
