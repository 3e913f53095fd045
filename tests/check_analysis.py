#!/usr/bin/env python3
"""What a compiler can say of core/ and preload/ without running them.

  check_analysis.py --root DIR --build-dir DIR thread-safety   clang's analysis of the lock annotations
  check_analysis.py --root DIR --build-dir DIR tidy            clang-tidy with .clang-tidy

The flags are those of compile_commands.json, whatever compiler that is for. Each run begins with a source that is wrong:
an analysis that does not say so has not looked (--self-test runs nothing else). Ends with 77 where the tool is missing.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

# In the headers' own words: a guarded member that is touched without its lock; a value that is used after a move.
WRONG = {
    "thread-safety": '#include "core/base/mutex.h"\n'
                     "struct S { rsock::Mutex m; int n RSOCK_GUARDED_BY(m) = 0; int f() { return n; } };\n"
                     "int g(S& s) { return s.f(); }\n",
    "tidy": "#include <string>\n#include <utility>\n"
            "std::string f(std::string s) { std::string t = std::move(s); return s + t; }\n",
}
SAYS = {"thread-safety": "-Wthread-safety", "tidy": "bugprone-use-after-move"}


def find_tool(names):
    return next((path for path in map(shutil.which, names) if path), None)


def commands_of(root, build_dir):
    """{source: [flags that matter to a front end]} of the library's own sources."""
    found = {}
    for entry in json.loads((build_dir / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if source.suffix != ".cc" or not any(source.is_relative_to(root / room) for room in ("core", "preload")):
            continue
        words = shlex.split(entry["command"])
        flags = [w for w in words if w.startswith(("-I", "-D", "-U", "-std"))]
        flags += [w for i, word in enumerate(words) if word == "-isystem" for w in words[i:i + 2]]
        found[source] = flags
    return found


def run_tool(tool, kind, root, source, flags):
    common = flags + ["-fno-rtti", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-deprecated-declarations",
                      "-Wno-ignored-attributes"]
    if kind == "thread-safety":
        command = [tool, "-fsyntax-only", "-Wthread-safety", "-Werror"] + common + [str(source)]
    else:
        command = [tool, "--quiet", "--config-file=%s" % (root / ".clang-tidy"), str(source), "--"] + common
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def finds_what_is_wrong(tool, kind, root, flags):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "wrong.cc")
        source.write_text(WRONG[kind])
        status, text = run_tool(tool, kind, root, source, flags)
    if status != 0 and SAYS[kind] in text:
        return True
    print("The analysis does not find what is wrong on purpose (status %d):\n%s" % (status, text))
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--build-dir", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("kind", choices=sorted(WRONG))
    options = parser.parse_args()
    root = options.root.resolve()
    stem = "clang++" if options.kind == "thread-safety" else "clang-tidy"
    tool = find_tool([stem + "-14", stem])
    if tool is None:
        print("skipped: no %s" % stem)
        return 77
    sources = commands_of(root, options.build_dir)
    if not sources:
        print("no sources of core/ and preload/ in compile_commands.json")
        return 1
    if not finds_what_is_wrong(tool, options.kind, root, next(iter(sources.values()))):
        return 1
    if options.self_test:
        return 0
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for status, text in pool.map(lambda item: run_tool(tool, options.kind, root, *item), sources.items()):
            if status != 0:
                bad += 1
                print("\n".join(line for line in text.splitlines() if not line.endswith("warnings generated.")))
    print("%s: %d sources, %d with findings" % (options.kind, len(sources), bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
