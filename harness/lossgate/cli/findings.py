# SPDX-License-Identifier: Apache-2.0
"""``lossgate findings``: what was found in public losses, and whether it is there here."""

from lossgate.cli.app import Exit, app


@app.command
def findings(*names: str, run: bool = False) -> int:
    """List what lossgate found in public losses; or show findings with the scripts that show them.

    A script needs the library, and not lossgate. The exit code is 1 if a defect is there.

    Args:
        names: Names of findings, such as liger-stride. By default all are listed.
        run: With the list, run the scripts of all libraries that are installed. It takes minutes.
    """
    from lossgate.findings import FINDINGS, find, show

    asked, there = [find(name) for name in names], False
    for number, finding in enumerate(asked):
        seen = finding.run()
        there |= seen.there is True
        print(("\n" if number else "") + show(finding, seen), flush=True)
    if not asked:
        widest = max(map(len, FINDINGS))
        for finding in FINDINGS.values():
            here = finding.of.installed
            said = "not installed" if here is None else f"{here} here"
            if run and here is not None:
                seen = finding.run()
                there |= seen.there is True
                said += f", {seen.in_words}" + (f": {seen.output}" if seen.there is None else "")
            print(f"{finding.name:{widest}}  {finding.severity}  {finding.sentence}", flush=True)
            versions = f"{finding.of.package} {', '.join(finding.versions)}"
            print(f"{'':{widest}}  {versions}; {said}", flush=True)
    return Exit.DISAGREE if there else Exit.AGREE
