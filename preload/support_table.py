#!/usr/bin/env python3
"""SUPPORT.md from intercept.def: which calls are intercepted, and what happens to a stream in each.

    support_table.py             writes SUPPORT.md beside intercept.def
    support_table.py --check     compares; exits with 1 and the difference when it is out of date
    support_table.py --names     prints the names, one a line
"""

import argparse
import difflib
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROW = re.compile(r'^RSOCK_(CALL|LIBC|ALIAS|ENTRY)\((\w+), *(.*)\)\s*$')
FIELD = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,\s][^,]*)')
HEADING = re.compile(r"^// --- (.*?) -*$")

INTRODUCTION = """# Calls that librsock.so intercepts

Written by `support_table.py` from `intercept.def`; edit that one. Calls on descriptors that are not
TCP streams go to libc unchanged. A stream that "stays on TCP for good" is set down first, so that
the kernel's stream goes on at the right byte; it is as correct as before, and no faster than TCP.

What passes every hook by, and finds plain TCP because streams are lifted on intercepted traffic only:
stdio inside libc on descriptors that did not come from `fdopen`, io_uring, system calls made without
libc (Go, static programs), and set-uid programs, for which the loader ignores LD_PRELOAD.
"""


def rows(text):
    """Yields (heading, None) and (name, fields of the row) in file order."""
    for line in text.splitlines():
        heading = HEADING.match(line)
        row = ROW.match(line)
        if heading:
            yield heading.group(1), None
        elif row:
            macro, name, rest = row.groups()
            fields = [quoted or plain.strip() for quoted, plain in FIELD.findall(rest)]
            if macro == "ALIAS":
                yield name, {"of": fields[0], "optional": False, "effect": fields[1]}
            else:
                yield name, {"of": None, "optional": "optional" in fields, "effect": fields[-1]}


def table(text):
    out = [INTRODUCTION]
    for name, row in rows(text):
        if row is None:
            out.append(f"\n## {name[0].upper()}{name[1:]}\n\n| call | a stream |\n|---|---|\n")
        else:
            mark = " (where libc has it)" if row["optional"] else ""
            out.append(f"| `{name}`{mark} | {row['effect']} |\n")
    return "".join(out)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--names", action="store_true")
    options = arguments.parse_args()
    text = (HERE / "intercept.def").read_text()
    if options.names:
        print("\n".join(name for name, row in rows(text) if row is not None))
        return 0
    target = HERE / "SUPPORT.md"
    wanted = table(text)
    if not options.check:
        target.write_text(wanted)
        return 0
    found = target.read_text() if target.exists() else ""
    if found == wanted:
        return 0
    sys.stdout.writelines(difflib.unified_diff(found.splitlines(True), wanted.splitlines(True),
                                               "SUPPORT.md", "from intercept.def"))
    print("SUPPORT.md is out of date: run preload/support_table.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
