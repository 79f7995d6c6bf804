# SPDX-License-Identifier: Apache-2.0
"""Makes the decks that come with lossgate anew, for what is declared most: by the candidates of
``ci/verify``, by the kernel of the README, by the presets of ``lossgate.assert_matches``, and by
whoever declares no more than one must.

    python ci/ship_decks.py          # in the environment of ci/verify; ten minutes

Their files change where they say something else. So that nothing old stays, what is made anew does
not hang on what is there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from inspect import Parameter, Signature
from multiprocessing import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lossgate.declaration.candidate import Candidate

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "bfloat16")


def declared() -> Iterator[tuple[str, str, str]]:
    """Yields the spec, head and dtype of those who declare no more than they must. A preset stands
    in place of a spec, with the parameters of the function in place of a head.
    """
    from lossgate.losses import SPECS
    from lossgate.plain_functions.presets import PRESETS

    yield from ((preset, parameters, "float32") for preset in PRESETS for parameters in ("needed", "all"))
    yield from ((spec.name, head, dtype) for spec in SPECS.values() for head in spec.inputs for dtype in DTYPES)


def make(spec: str, head: str, dtype: str) -> None:
    """Makes the deck of a declaration, and asks what it shows."""
    import torch

    from lossgate import candidate
    from lossgate.adequacy.choice import choice_of
    from lossgate.adequacy.deck import deck_of
    from lossgate.plain_functions.presets import PRESETS

    torch.set_num_threads(1)
    if spec in PRESETS:
        own = of_preset(spec, everything=head == "all")
    else:
        own = candidate(spec, head=head, dtypes=(dtype,), name="any")(lambda inputs, options, mesh: None)
    deck = deck_of(own, dtype, seed=0)
    choice_of(own, deck, dtype)
    if own.excludes and deck.equivalent:
        _ = deck_of(replace(own, excludes={}), dtype, seed=0).equivalent


def of_preset(name: str, *, everything: bool) -> "Candidate":
    """Returns the candidate of a function that has all parameters of a preset, or what it needs."""
    from lossgate.plain_functions.plain_function import as_candidate
    from lossgate.plain_functions.presets import PRESETS

    preset, keyword = PRESETS[name], Parameter.KEYWORD_ONLY
    by_thing = {thing: one for one, thing in preset.names.items() if everything or thing in preset.needs}

    def takes(**given: Any) -> None: ...

    takes.__dict__["__signature__"] = Signature([Parameter(one, keyword) for one in by_thing.values()])
    return as_candidate("", takes, preset.spec, name, layouts=("single",))


def verify(folder: Path) -> None:
    """Verifies what ``ci/verify`` and the README verify."""
    readme = re.search(r"```python\n([^`]*@lossgate\.candidate.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    (folder / "my_kernels.py").write_text(readme[1])
    lossgate = [str(Path(sys.executable).with_name("lossgate")), "verify", "--quiet"]
    subprocess.run([*lossgate, "my_kernels.py", "--ranks", "2", "--jobs", "0"], cwd=folder, check=True)
    subprocess.run([ROOT / "ci/verify", "--quiet", "--evidence", folder / "out.jsonl"], check=True)


def ship(store: Path) -> tuple[int, int]:
    """Puts what was kept in a folder into lossgate.

    Returns:
        The number of entries, and of those that are new or other than before.

    Raises:
        SystemExit: if some are of other code or versions, as when a file was changed meanwhile.
    """
    from lossgate.adequacy.store import CODE, SHIPPED, code, name_of, packed, unpacked, versions

    SHIPPED.mkdir(exist_ok=True)
    entries = dict[str, bytes]()
    for path in store.iterdir():
        key, content = unpacked(path.read_bytes())
        of, *made_by, own = key.split("\n", maxsplit=3)
        if made_by != [code(of), versions()]:
            sys.exit(f"the code or a version was changed while decks were made; run {sys.argv[0]} again")
        if of == "decks":
            entries[name_of(own)] = packed(own, content)
    others = 0
    for path in SHIPPED.iterdir():
        if path.name not in entries:
            path.unlink()
    for name, entry in entries.items():
        path = SHIPPED / name
        if not path.exists() or path.read_bytes() != entry:
            path.write_bytes(entry)
            others += 1
    (SHIPPED / CODE).write_text(code("decks") + "\n")
    return len(entries), others


def main() -> None:
    with TemporaryDirectory() as name:
        store, folder = Path(name, "store"), Path(name, "work")
        folder.mkdir()
        os.environ["LOSSGATE_CACHE"], os.environ["LOSSGATE_ANEW"] = str(store), "yes"
        with Pool() as pool:
            pool.starmap(make, declared(), chunksize=1)
        verify(folder)
        entries, others = ship(store)
    print(f"{entries} entries come along, of which {others} are new or say something else")


if __name__ == "__main__":
    main()
