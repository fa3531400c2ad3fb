"""The process in which a regular expression is searched: standard library only, run as a script.

It reads ``{"pattern": …, "texts": […]}`` as JSON. It writes one line that says whether the expression could
be read, then for each text, as soon as it is done, what marks the patient there, or null. All is ASCII.
"""

from __future__ import annotations

import json
import re
import sys


def marked(pattern: re.Pattern[str], text: str) -> str | None:
    """The group named ``patient`` if there is one, else all groups joined, else the whole match."""
    match = pattern.search(text)
    if match is None:
        return None
    if "patient" in pattern.groupindex:
        return match["patient"]
    return "/".join(group for group in match.groups() if group) if pattern.groups else match[0]


def main() -> None:
    task = json.load(sys.stdin)
    try:
        pattern = re.compile(task["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        print(json.dumps({"error": str(error)}))
        return
    print(json.dumps({"error": None}), flush=True)
    for text in task["texts"]:
        print(json.dumps(marked(pattern, text)), flush=True)  # whoever waits learns where it hangs


if __name__ == "__main__":
    main()
