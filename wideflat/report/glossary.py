"""What the words of the paper mean, for those who read a page and not the paper."""

from __future__ import annotations

import html
import re

__all__ = ["WORDS", "explained", "key_of"]

#: Word or phrase, as it stands in tables and sentences -> what it means.
WORDS = {
    "draw": "How the training images were chosen: balanced (as many of each class) or random (as they come).",
    "balanced": "Test error with both classes counting the same: there are eight times more coats than dresses.",
    "solved": "How many restarts ended without a training error, of all.",
    "with polish": "The same after plain SGD, of a few hundred epochs at most, had removed the last training errors.",
    "d/D": "Distance from the solution, in units of that of a random network: 0 is the solution itself.",
    "Φ": "Local entropy: the logarithm of the share of networks at this distance that make no training error, for each "
    "weight. 0 is flattest; the more negative, the sharper.",
    "δE": "Local energy: by how much the training error grows when noise of strength σ is put on the weights. The "
    "smaller, the flatter.",
    "σ": "Strength of the noise: each weight is multiplied by 1 + σ times a normal random number.",
    "γ": "Strength of the pull between replicas, or between the explorer of Entropy-SGD and its center.",
    "free entropy": "Logarithm of a Gaussian volume around the solution in which each place counts by how small its "
    "loss is. The larger, the more room there is around the solution.",
    "barycenter": "The network whose weights are the mean of the replicas' weights.",
    "center": "The weights w that Entropy-SGD keeps; the network wanders around them while it trains.",
    "replicas": "Several copies of a network that train side by side and attract each other.",
    "restart": "A training of the same network from other random weights.",
}

_PATTERN = re.compile(
    "|".join(rf"(?<![\w/]){re.escape(word)}(?:s\b|\b)?(?![\w/])" for word in sorted(WORDS, key=len, reverse=True))
)


def key_of(word: str) -> str:
    """The name of a word's entry in a page."""
    return f"word-{list(WORDS).index(word) + 1}"


def explained(text: str, met: set[str]) -> str:
    """Text as HTML, in which the words of the glossary tell their meaning to the pointer and to the keyboard.

    Args:
        text: What is said, not escaped.
        met: Where the words are noted that were met; each is marked once in a text.

    Example:
        >>> met = set()
        >>> explained("errors < 3, balanced %", met), met
        ('errors &lt; 3, <span class="term" tabindex="0" aria-describedby="word-2">balanced</span> %', {'balanced'})
    """
    parts, here, last = [], set(), 0
    for match in _PATTERN.finditer(text):
        word = match.group() if match.group() in WORDS else match.group().removesuffix("s")
        if word not in WORDS or word in here:
            continue
        here.add(word)
        parts.append(html.escape(text[last : match.start()]))
        parts.append(f'<span class="term" tabindex="0" aria-describedby="{key_of(word)}">{match.group()}</span>')
        last = match.end()
    met |= here
    return "".join([*parts, html.escape(text[last:])])
