# SPDX-License-Identifier: Apache-2.0
"""Texts with a few mistakes in them, for tests of what reads them."""

from random import Random


def mutated(text: str, random: Random) -> str:
    """Returns a text with a few characters and lines removed, doubled, moved or added."""
    for _ in range(random.randint(1, 3)):
        lines = text.splitlines(keepends=True) or [""]
        at, other = random.randrange(len(lines)), random.randrange(len(text) + 1)
        match random.randrange(6):
            case 0:
                text = "".join((*lines[:at], *lines[at + 1 :]))
            case 1:
                text = "".join((*lines[:at], lines[at], *lines[at:]))
            case 2:
                text = "".join((*lines[at:], *lines[:at]))
            case 3:
                text = text[:other] + text[other + 1 :]
            case 4:
                text = text[:other] + random.choice("[]{}\"'#=,.\n\\ *-019aé\0") + text[other:]
            case _:
                text = text[:other] + random.choice(['"""', "'''", "[[a]]\n", "x = 1\n", "{}", "\r\n"]) + text[other:]
    return text


def with_other_bytes(content: bytes, random: Random) -> bytes:
    """Returns content with a few other bytes in it."""
    changed = bytearray(content)
    for _ in range(random.randint(1, 4)):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)
