#!/usr/bin/env python3
"""What librsock.so defines for everybody is exactly what intercept.def lists, and it needs libc alone.

1. `nm -D --defined-only` and the list agree, both ways.
2. The two names of an alias have one address.
3. The only libraries it asks the loader for are the C library and the loader itself: every program
   that is started with it would pay for more.
"""

import argparse
import pathlib
import subprocess
import sys


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--library", required=True)
    arguments.add_argument("--preload-dir", required=True, type=pathlib.Path)
    arguments.add_argument("--any-needed", action="store_true", help="skip 3 (sanitizer builds)")
    options = arguments.parse_args()

    sys.path.insert(0, str(options.preload_dir))
    sys.dont_write_bytecode = True
    import support_table

    listed = {name: row for name, row in
              support_table.rows((options.preload_dir / "intercept.def").read_text()) if row}
    defined = {}
    for line in output("nm", "-D", "--defined-only", options.library).splitlines():
        address, _, name = line.split()
        defined[name.split("@")[0]] = address

    faults = [f"{name}: listed, but not defined" for name in listed.keys() - defined.keys()]
    faults += [f"{name}: defined, but not listed" for name in defined.keys() - listed.keys()]
    for name, row in listed.items():
        if row["of"] and defined.get(name) != defined.get(row["of"]):
            faults.append(f"{name}: not the same body as {row['of']}")
    if not options.any_needed:
        for line in output("readelf", "-d", options.library).splitlines():
            if "(NEEDED)" in line:
                needed = line.split("[")[1].rstrip("]")
                if not needed.startswith(("libc.so.", "ld-linux")):
                    faults.append(f"needs {needed}")
    for fault in sorted(faults):
        print(fault)
    print(f"{len(defined)} names defined, {len(listed)} listed, {len(faults)} faults")
    return 1 if faults or not listed else 0


if __name__ == "__main__":
    sys.exit(main())
