#!/usr/bin/env python3
"""Compares the byte tables of core/wire/PROTOCOL.md with the structs, both ways.

Forward: every row becomes a static_assert on offset and size (or value), compiled with the project's compiler.
Backward: every member of every ...Wire struct, of ControlPage, of DirectionWords and of PageSpan, every enumerator of the wire
enums and every magic number must have a row. --self-test breaks a table in memory and demands that it is noticed.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

HEADERS = ["core/wire/control_page.h", "core/wire/rendezvous.h", "core/wire/line.h", "core/wire/cm_data.h"]
ENUMS = ["MessageType", "Verdict", "LineType", "Word", "CmType"]
HEADING = re.compile(r"^### (\w+), (\d+) bytes$")
FIELD_ROW = re.compile(r"^\| (\d+) \| (\d+) \| `(\w+)` \|")
VALUE_ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \|$")


def read_tables(text):
    structs, constants, current = {}, {}, None
    for line in text.splitlines():
        if line.startswith("#"):
            match = HEADING.match(line)
            current = match.group(1) if match else None
            if match:
                structs[current] = (int(match.group(2)), {})
        elif current and (match := FIELD_ROW.match(line)):
            structs[current][1][match.group(3)] = (int(match.group(1)), int(match.group(2)))
        elif match := VALUE_ROW.match(line):
            constants[match.group(1)] = match.group(2)
    return structs, constants


def without_comments(code):
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", code, flags=re.S))


def read_structs(code):
    """Members by struct: enough of C++ for plain structs of wire layout."""
    found = {}
    for name, body in re.findall(r"struct (\w+Wire|ControlPage|DirectionWords|PageSpan) \{([^{}]*)\}[^;{}]*;", code, flags=re.S):
        members = []
        for declaration in body.split(";"):
            declaration = re.sub(r"alignas\([^)]*\)", "", declaration).strip()
            if match := re.search(r"(\w+)\s*(\[\w+\])*$", declaration):
                members.append(match.group(1))
        found[name] = members
    return found


def read_enums(code):
    found = []
    for enum in ENUMS:
        body = re.search(r"enum class %s\b[^{]*\{(.*?)\}" % enum, code, flags=re.S).group(1)
        found += [f"{enum}::{name}" for name in re.findall(r"(k\w+)\s*=", body)]
    return found + re.findall(r"constexpr \w+ (k\w+Magic)\b", code)


def missing_rows(tables, code):
    structs, constants = tables
    problems = []
    for name, members in read_structs(code).items():
        if name not in structs:
            problems.append(f"{name} has no table")
            continue
        rows = structs[name][1]
        problems += [f"{name}.{m} has no row" for m in members if m not in rows]
        problems += [f"{name}.{m} is in the table only" for m in rows if m not in members]
    problems += [f"{e} has no row" for e in read_enums(code) if e not in constants]
    return problems


def assertions(tables):
    structs, constants = tables
    lines = [f'#include "{header}"' for header in HEADERS] + ["using namespace rsock::wire;"]
    for name, (size, rows) in structs.items():
        lines.append(f'static_assert(sizeof({name}) == {size}, "{name}: size");')
        for field, (offset, length) in rows.items():
            lines.append(f'static_assert(offsetof({name}, {field}) == {offset}, "{name}.{field}: offset");')
            lines.append(f'static_assert(sizeof({name}::{field}) == {length}, "{name}.{field}: size");')
    for name, value in constants.items():
        lines.append(f'static_assert(static_cast<uint64_t>({name}) == {value}, "{name}: value");')
    return "\n".join(lines) + "\n"


def check(tables, code, args):
    problems = missing_rows(tables, code)
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "tables.cc"
        source.write_text(assertions(tables))
        command = [args.cxx, "-std=c++20", "-fsyntax-only", f"-I{args.root}"]
        command += [f"-I{path}" for path in args.include.split(":") if path] + [str(source)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        problems += [line for line in result.stderr.splitlines() if "error" in line] or [result.stderr]
    return problems


def self_test(text, code, args):
    def broken(pattern, replacement):
        changed = re.sub(pattern, replacement, text, count=1)
        return changed == text or not check(read_tables(changed), code, args)

    changes = [(r"\| 140 \| 4 \| `replayed`", "| 144 | 4 | `replayed`"),  # a wrong offset
               (r"\| 32 \| 16 \| `caller_address`", "| 32 | 8 | `caller_address`"),  # a wrong size
               (r"\| 24 \| 8 \| `value`[^\n]*\n", ""),  # a row that is missing
               (r"\| 42 \| 8 \| `nonce`[^\n]*\n", ""),  # ... of a packed struct
               (r"\| `kCmMagic`[^\n]*\n", ""),  # ... of a magic number
               (r"\| `Word::kEndOk`[^\n]*\n", ""),  # ... of an enumerator
               (r"`Verdict::kLimit` \| 7", "`Verdict::kLimit` | 9")]  # a wrong value
    return [f"not noticed: {pattern}" for pattern, replacement in changes if broken(pattern, replacement)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default=str(pathlib.Path(__file__).resolve().parents[2]))
    parser.add_argument("--cxx", default="c++")
    parser.add_argument("--include", default="", help="folders, separated by colons")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    root = pathlib.Path(args.root)
    text = (root / "core/wire/PROTOCOL.md").read_text()
    code = without_comments("\n".join((root / header).read_text() for header in HEADERS))
    tables = read_tables(text)
    problems = self_test(text, code, args) if args.self_test else check(tables, code, args)
    for problem in problems:
        print(problem)
    rows = sum(len(rows) for _, rows in tables[0].values())
    print(f"{len(tables[0])} structs, {rows} fields, {len(tables[1])} constants: "
          f"{'differ' if problems else 'agree'}")
    return 1 if problems or rows == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
