#!/usr/bin/env python3
"""The arrows between the rooms point down, and core/ calls nothing that we intercept.

1. A file of a room includes only its own room and rooms above it in the list base, {os, wire, ring},
   transport, stream, poll, preload. os, wire and ring do not include each other.
2. The backends in core/transport/ never include each other; transport.h includes no backend.
3. Nothing outside preload/ includes preload/.
4. No undefined symbol of librsock_core.a is a name in preload/intercept.def, nor dlsym (which allocates and takes the
   loader's lock: only the keeper may, for rdma-core).
5. Every include of ours is written from the root ("core/ring/byte_ring.h").
6. Fences are made by core/base/fence.h.

Breaking a rule prints file:line and the rule; --self-test proves that each rule can fail.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

RANK = {"base": 0, "os": 1, "wire": 1, "ring": 1, "transport": 2, "stream": 3, "poll": 4, "preload": 5}
FENCE = "core/base/fence.h"
MAY_LOOK_UP = "rdma_library.cc.o"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
SOURCES = (".h", ".cc", ".def")


def room_of(path):
    """("ring", "") for core/ring/..., ("transport", "shm") for a backend, None outside the rooms."""
    parts = pathlib.PurePosixPath(path).parts
    if parts[0] == "preload":
        return "preload", ""
    if len(parts) < 3 or parts[0] != "core" or parts[1] not in RANK:
        return None
    backend = parts[2] if parts[1] == "transport" and len(parts) > 3 else ""
    return parts[1], backend


def judge(user, used):
    """Why file `user` may not include `used`; None when it may. Both are relative to the root."""
    above = room_of(used)
    if above is None:
        return "includes of ours are written from the root, and name a known room"
    mine = room_of(user)
    if mine is None:
        return None
    if mine[0] == above[0]:
        if mine[0] == "transport" and above[1] and above[1] != mine[1]:
            return "a backend is included by itself and by rooms above transport only"
        return None
    if RANK[above[0]] >= RANK[mine[0]]:
        return f"{mine[0]}/ stands beside or below {above[0]}/ in the list of rooms"
    return None


def check_includes(root):
    faults, seen = [], 0
    for top in ("core", "preload"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            seen += 1
            name = path.relative_to(root).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                # g++ refuses it under ThreadSanitizer: nobody could build that any more, and nobody noticed.
                if "atomic_thread_fence" in line and name != FENCE:
                    faults.append(f"{name}:{number}: atomic_thread_fence: full_fence() of {FENCE} builds everywhere")
                found = INCLUDE.match(line)
                # Generated headers have no folder and no room.
                if not found or ("/" not in found[1] and not (path.parent / found[1]).exists()):
                    continue
                why = judge(name, found[1])
                if why:
                    faults.append(f'{name}:{number}: "{found[1]}": {why}')
    if seen == 0:
        faults.append(f"{root}: no source found")
    return faults


def intercepted_names(def_file):
    """The first argument of every row `MACRO(name, ...)`."""
    text = re.sub(r"//.*", "", def_file.read_text())
    return set(re.findall(r"^\s*[A-Z_]+\(\s*([a-z_]\w*)", text, flags=re.M))


def undefined_symbols(archive):
    """Names, and those of them that only MAY_LOOK_UP uses."""
    out = subprocess.run(["nm", "-u", str(archive)], check=True, capture_output=True, text=True).stdout
    names, excused, member = set(), set(), ""
    for line in out.splitlines():
        if line.endswith(".o:"):
            member = line[:-1]
        elif found := re.match(r"\s+[Uw]\s+(\w+)", line):
            (excused if member == MAY_LOOK_UP else names).add(found[1])
    return names, excused - names


def check_symbols(root, archive):
    def_file = root / "preload" / "intercept.def"
    if not def_file.exists():
        print("layers: preload/intercept.def does not exist yet, symbols not compared")
        return []
    names = intercepted_names(def_file)
    if len(names) < 20:
        return [f"{def_file}: only {len(names)} names understood"]
    undefined, excused = undefined_symbols(archive)
    if len(undefined) < 5:
        return [f"{archive}: only {len(undefined)} undefined symbols understood"]
    bad = (undefined & (names | {"dlsym", "dlvsym"})) | (excused & names)
    return [f"{archive.name}: core/ calls {name}, which we intercept" for name in sorted(bad)]


def self_test():
    """Each line is a file, an include and whether it is allowed."""
    cases = [
        ("core/ring/a.h", "core/base/check.h", True),
        ("core/ring/a.h", "core/ring/b.h", True),
        ("core/ring/a.h", "core/wire/b.h", False),
        ("core/base/a.h", "core/os/os.h", False),
        ("core/transport/transport.h", "core/wire/b.h", True),
        ("core/transport/transport.h", "core/transport/shm/b.h", False),
        ("core/transport/shm/a.h", "core/transport/transport.h", True),
        ("core/transport/shm/a.h", "core/transport/fake/b.h", False),
        ("core/transport/shm/a.cc", "core/transport/shm/a.h", True),
        ("core/stream/a.cc", "core/transport/shm/b.h", True),
        ("core/stream/a.cc", "core/poll/b.h", False),
        ("core/poll/a.cc", "core/stream/b.h", True),
        ("core/poll/a.cc", "preload/entry.h", False),
        ("preload/a.cc", "core/poll/b.h", True),
        ("preload/a.cc", "preload/entry.h", True),
        ("core/ring/a.cc", "byte_ring.h", False),
    ]
    for user, used, allowed in cases:
        assert (judge(user, used) is None) == allowed, (user, used, judge(user, used))
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        (root / "core" / "ring").mkdir(parents=True)
        (root / "core" / "ring" / "a.cc").write_text('#include "preload/entry.h"\n')
        assert len(check_includes(root)) == 1
        (root / "core" / "ring" / "a.cc").write_text("std::atomic_thread_fence(std::memory_order_seq_cst);\n")
        assert len(check_includes(root)) == 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--archive", type=pathlib.Path)
    args = parser.parse_args()
    self_test()
    faults = check_includes(args.root)
    if args.archive:
        faults += check_symbols(args.root, args.archive)
    print("\n".join(faults) if faults else "layers: the arrows point down")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
