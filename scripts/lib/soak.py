"""scripts/test --soak: what is random, again and again with new seeds, for as long as one likes.

First clang-tidy. Then in turn: the readiness stress in each mix (two processes, or one that is both ends), pairs that account for every byte,
and the services. What to run is taken from ctest's own list, so that nothing is described twice. A failure is kept in
BUILD/soak with the command that repeats it, and the run goes on: the end says what failed.
"""

import argparse
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time

SERVICE_LIMIT_S = 300


def entries(build_dir):
    """[(name, command, environment)] of ctest's list."""
    text = subprocess.run(["ctest", "--test-dir", str(build_dir), "--show-only=json-v1"], check=True, text=True,
                          capture_output=True).stdout
    found = []
    for test in json.loads(text)["tests"]:
        if "command" not in test:
            continue
        environment = {}
        for prop in test.get("properties", []):
            if prop["name"] == "ENVIRONMENT":
                environment = dict(pair.split("=", 1) for pair in prop["value"])
        found.append((test["name"], test["command"], environment))
    return found


def replaced(command, option, value):
    """The command with another value behind an option."""
    at = command.index(option) + 1
    return command[:at] + [str(value)] + command[at + 1:]


class Soak:
    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        self.folder = pathlib.Path(options.build_dir) / "soak"
        self.folder.mkdir(exist_ok=True)
        tests = entries(options.build_dir)
        self.stress = [t for t in tests if t[0].startswith("integration.stress.") and not t[0].endswith(".tcp")]
        self.pairs = [t for t in tests if t[0].startswith("integration.hash_pair.") and t[0].endswith(".shm")]
        self.services = [t for t in tests if t[0].startswith("integration.services.")]
        if not self.stress or not self.pairs:
            raise SystemExit("soak: nothing to run in %s" % options.build_dir)
        self.runs, self.failed = 0, []

    def turns(self):
        """One of each kind after the other, each list in an order of its own, for ever."""
        decks = {}
        while True:
            for kind in ("stress", "stress", "pairs", "stress", "services"):
                deck = decks.setdefault(kind, [])
                if not deck:
                    deck.extend(getattr(self, kind))
                    self.rng.shuffle(deck)
                if deck:
                    yield kind, *deck.pop()

    def command_of(self, kind, command, left):
        seed = self.rng.randrange(1, 1 << 31)
        if kind == "stress":
            command = replaced(command, "--seed", seed)
            command = replaced(command, "--seconds", int(min(self.options.stress_seconds, max(10, left))))
            # Now and then both ends in one process, or the library at one end only.
            return replaced(command, "--mode", self.rng.choice(["shm"] * 5 + ["alone"] * 3 + ["server-only", "client-only"]))
        return command + ["seed=%d" % seed] if kind == "pairs" else command

    def run_one(self, name, command, environment, limit=None):
        start = time.monotonic()
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            out, _ = process.communicate(timeout=limit or SERVICE_LIMIT_S + self.options.stress_seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            status = "too long"
        self.runs += 1
        good = status in (0, 77)
        words = {0: "ok", 77: "skipped"}.get(status, "FAILED (%s)" % status)
        print("%s %6.1f s  %-40s %s" % (time.strftime("%H:%M:%S"), time.monotonic() - start, name, words), flush=True)
        if good:
            return
        repeat = " ".join(["%s=%s" % pair for pair in environment.items()] + [shlex.join(command)])
        kept = self.folder / ("%03d-%s.txt" % (self.runs, name))
        kept.write_text("%s\n\n%s" % (repeat, out))
        self.failed.append("%s\n  repeat: %s\n  output: %s" % (name, repeat, kept))
        print("\n".join(out.splitlines()[:30]), flush=True)

    def run(self):
        end = time.monotonic() + self.options.minutes * 60
        print("soak: %g minutes, seed %d" % (self.options.minutes, self.options.seed), flush=True)
        root = pathlib.Path(__file__).resolve().parents[2]
        self.run_one("analysis.tidy", [sys.executable, "-B", str(root / "tests" / "check_analysis.py"), "--root", str(root),
                                       "--build-dir", str(self.options.build_dir), "tidy"], {}, limit=1800)
        for kind, name, command, environment in self.turns():
            left = end - time.monotonic()
            if left <= 0:
                break
            self.run_one(name, self.command_of(kind, command, left), environment)
        print("soak: %d runs, %d failed" % (self.runs, len(self.failed)))
        for line in self.failed:
            print(line)
        return 1 if self.failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--stress-seconds", type=float, default=45)
    return Soak(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
