"""Prompts to measure with: seeded random words, so that a run can be repeated and no two prompts share a prefix."""

from __future__ import annotations

import random
import secrets

# Common words, one token each (with the space before it) in most vocabularies.
WORDS = """
about above across act add after again against age ago air all also always among and animal answer any appear area
arm art ask away back ball base be beauty because become been before began begin behind best better between big bird
black blue boat body book both box boy bring brought build built busy but call came can car care carry case cat cause
center certain change check city class clear close cold color come common complete contain could country course cover
cross cry cut dark day decide deep did differ direct do does dog done door down draw drive dry during each early
earth ease east eat end enough even ever every example eye face fact fall family far farm fast father feel feet few
field figure fill final find fine fire first fish five fly follow food foot for force form found four free friend from
front full game gave get girl give go gold good got govern great green ground group grow had half hand happen hard has
have he head hear heart heat help her here high him his hold home horse hot hour house how hundred idea if inch
interest is island it just keep kind king knew know land language large last late laugh lay lead learn leave left less
""".split()  # noqa: SIM905 - quotes would not help the reader


def draw_seed() -> str:
    return secrets.token_hex(4)


def prompt(seed: str, index: int, words: int) -> str:
    """The ``index``-th prompt of a seed. The number of *tokens* is up to the model; its usage tells."""
    pick = random.Random(f"{seed}/{index}")  # noqa: S311 - a workload, not a secret
    return " ".join(pick.choices(WORDS, k=words))


def drawn(seed: str, index: int, n: int) -> int:
    """Which of ``n`` prompts the ``index``-th request repeats."""
    return random.Random(f"{seed}/draw {index}").randrange(n)  # noqa: S311 - as above
