# SPDX-License-Identifier: Apache-2.0
"""Measures whether the few layouts that cover what differs kill every bug that all layouts kill.

    python benchmarks/covering.py                    # every bug that we know, at the profile ci
    python benchmarks/covering.py --profile dev unseen

Each wrong kernel is verified on the covering matrix until a cell disagrees. Only one that survives
is verified on the other layouts and dtypes of the full matrix, too.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from time import process_time
from typing import Any

import torch
from bank import cells as cells_of_bank
from diagnosis import PARTS, modules

from kernel_bank.cross_entropy import STYLES
from kernel_bank.property_bugs import PROPERTY_BUGS
from kernel_bank.sharded_vocabulary import SHARD_BUGS, for_every_split
from kernel_bank.whole_sequences import INPUT_BUGS, OUTPUT_BUGS, given_whole, returning_whole
from lossgate import Candidate, Layout
from lossgate.base.layout import layouts_up_to
from lossgate.dense_candidates import dense_candidate
from lossgate.engine import run_cell as engine
from lossgate.engine.cell import Cell, Verdict
from lossgate.engine.matrix import covering
from lossgate.engine.plan import plan
from lossgate.engine.settings import PROFILES, Settings
from lossgate.losses import SPECS
from lossgate.problems.whole_sequences import Tokens

TOKENS: Sequence[Tokens] = ("rows", "packed")


def unseen() -> Iterator[Candidate]:
    return (getattr(module, name) for part in PARTS for module in modules(part) for name in module.BUGS)


def bank() -> Iterable[Candidate]:
    return {(bug, wrong.name): wrong for bug, wrong, _, _ in cells_of_bank()}.values()


def sharded() -> Iterator[Candidate]:
    return (for_every_split(STYLES["float32"][0], bug) for bug in SHARD_BUGS)


def whole() -> Iterator[Candidate]:
    given, returned = (dense_candidate(SPECS[name], "logits") for name in ("clipped_pg", "token_logprobs"))
    for tokens in TOKENS:
        yield from (given_whole(given, tokens, bug) for bug in INPUT_BUGS)
        yield from (returning_whole(given_whole(returned, tokens), bug) for bug in OUTPUT_BUGS)


def of_properties() -> Iterator[Candidate]:
    return (bug.candidate for bug in PROPERTY_BUGS.values())


BANKS: Mapping[str, Callable[[], Iterable[Candidate]]] = {
    one.__name__: one for one in (unseen, bank, sharded, whole, of_properties)
}


def _place(cell: Cell) -> tuple[Any, ...]:
    return cell.layout, cell.dtype, cell.property, cell.also


def killed(wrong: Candidate, settings: Settings, tried: Sequence[Cell] = ()) -> Cell | None:
    """Returns a cell that disagrees, if one does that was not tried. Properties beside agreement,
    which take longest, come last.
    """
    seen, few = {_place(cell) for cell in tried}, _few(wrong, settings)
    rest = [cell for cell in plan([wrong], settings) if _place(cell) not in seen]
    rest.sort(key=lambda cell: (cell.layout not in few, -len(cell.layout.axes)))
    cells = [replace(cell, also=()) for cell in rest] + [cell for cell in rest if cell.also]
    return next((cell for cell in cells if engine.run_cell(cell, settings).verdict is Verdict.DISAGREE), None)


def _few(wrong: Candidate, settings: Settings) -> list[Layout]:
    return covering(list(layouts_up_to(settings.ranks, wrong.axes)))


def outcome(wrong: Candidate, settings: Settings) -> tuple[str, Cell | None]:
    """Returns what kills a bug, in words, and where."""
    if cell := killed(wrong, settings):
        return "covering layouts" if cell.layout in _few(wrong, settings) else "the one layout more", cell
    cell = killed(wrong, replace(settings, matrix="full", property_ranks=settings.ranks), plan([wrong], settings))
    return "nothing" if cell is None else "the full matrix alone", cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("banks", nargs="*", choices=list(BANKS), help="by default all")
    parser.add_argument("--profile", default="ci", choices=list(PROFILES))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    engine.diagnose = lambda *_, **__: None  # only verdicts count here
    settings = replace(PROFILES[given.profile], matrix="covering", shrink_calls=0)
    for name in given.banks or BANKS:
        counts: Counter[str] = Counter()
        for wrong in BANKS[name]():
            by, cell = outcome(wrong, settings)
            counts[by] += 1
            if by != "covering layouts" or cell is None or cell.also:
                print(f"{wrong.name}: {by}{'' if cell is None else f', {cell}'}", flush=True)
        print(f"{name}: {counts.total()} bugs: " + ", ".join(f"{counts[by]} killed by {by}" for by in counts))
    print(f"{process_time():.0f} CPU seconds")


if __name__ == "__main__":
    main()
