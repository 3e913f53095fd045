"""What the drivers of this folder share: the same workload on plain TCP and over shared memory, compared.

A driver is a table of cases.  A case is a function of a Side, one run of the workload in one mode; it starts the
service and its clients through the Side, and tells it what it saw.  The judge's Side runs first, on plain TCP; what
the other one saw must be the same, and the summaries of the programs named by `lifts` must show that the bytes went
over shared memory, or the comparison would be TCP with TCP.

Services may run on another host (places.py) that sees the driver's folder too: --mode rdma --there ADDRESS:PORT. Then the
environment says SERVICES_HOST, where they listen, and SERVICES_SMALL where processors are emulated.

A client that no package has is a function of the driver's own file: `ask` runs it in a process of its own, so that
the driver itself is never preloaded.
"""

import argparse
import collections
import functools
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import traceback

import pairs
import pairs_net
import places

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts/lib"))  # service_programs

HOST = os.environ.get("SERVICES_HOST", "127.0.0.1")
HERE = places.Here()


SMALL = bool(os.environ.get("SERVICES_SMALL"))
# A lift takes seconds between emulated hosts, and a fast transfer of few bytes is over before.
UNHURRIED = ["--limit-rate", "2M"] if SMALL else []  # for curl


def sized(full, small):
    """How much work: full, or as much as an emulated processor does in the same time."""
    return small if SMALL else full


# Services fork and spawn while streams live, and what two processes hold stays on TCP; strict mode would rightly
# abort it. That streams are lifted is asked of the summaries instead.
LENIENT = {"RSOCK_STRICT": "0"}
ASK = "--ask"


def wait_until(holds, what, limit=8):
    deadline = time.monotonic() + sized(1, 5) * limit
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError("not within %d s: %s" % (limit, what))
        time.sleep(0.01)


class Side:
    """One run of a case in one mode: what it started, what it saw, what the summaries must show."""

    def __init__(self, mode, library, folder, script, place=HERE):
        self.place = place  # where its services run
        self.mode, self.library, self.folder, self.script = mode, library, pathlib.Path(folder), script
        self.seen, self.bounded, self.figures, self.complaints = {}, {}, {}, []
        self.started, self.proofs, self.reasons, self.counter, self.heirs = [], [], [], 0, {}
        self.passed = []

    # ---- starting ---------------------------------------------------------------------------------

    def _name(self, argv, name):
        self.counter += 1
        return "%02d-%s" % (self.counter, name or pathlib.Path(argv[0]).name.replace(".", "_"))

    def serve(self, argv_of_port, name=None):
        """Starts a service on a free port, waits until it listens: (program, port)."""
        program, port = pairs_net.start_listening(argv_of_port, self.mode, self.library, self.folder,
                                                  self._name(["service"], name), extra=LENIENT,
                                                  start=functools.partial(places.Process, self.place),
                                                  listens=self.place.listens)
        self.started.append(program)
        return program, port

    def start(self, argv, name=None, stdin=None):
        """Starts a program; with the shim where the mode has it."""
        more = {} if stdin is None else {"stdin": stdin}
        program = pairs_net.Program([str(a) for a in argv], self.mode, "client", self.library, self.folder,
                                    self._name(argv, name), LENIENT, **more)
        self.started.append(program)
        return program

    def finish(self, program, timeout=60):
        """Waits for a program that ends by itself; how it ended is seen. Returns its output's bytes."""
        status = program.wait(sized(1, 5) * timeout)
        if status != 0:
            self.complaints.append("%s ended with %s: %s" % (
                " ".join(program.argv)[:200], status, (program.err() or program.out())[-1500:]))
        return program.out_path.read_bytes()

    def run(self, argv, name=None, timeout=60, stdin=None, lifts=None):
        program = self.start(argv, name, stdin)
        if lifts:
            self.lifts(program, lifts)
        return self.finish(program, timeout)

    def run_plainly(self, argv, timeout=60):
        """What only prepares the case: without the shim on either side."""
        done = subprocess.run([str(a) for a in argv], env=pairs.plain_environment(), cwd=self.folder, timeout=timeout,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            raise RuntimeError("%s: %s" % (argv, done.stdout.decode(errors="replace")[-1500:]))

    def start_asking(self, function, *arguments):
        """Runs a function of the driver's own file in a process of its own."""
        return self.start([pairs.python(), "-B", self.script, ASK, function.__name__, *map(str, arguments)],
                          function.__name__)

    def answer(self, program, timeout=60):
        text = self.finish(program, timeout)
        try:
            return json.loads(text)
        except ValueError:
            raise RuntimeError("no answer: %r %s" % (text[-300:], program.err()[-1500:])) from None

    def ask(self, function, *arguments, timeout=60, lifts=None):
        program = self.start_asking(function, *arguments)
        if lifts:
            self.lifts(program, lifts)
        return self.answer(program, timeout)

    # ---- what was seen ----------------------------------------------------------------------------

    def saw(self, what, value):
        """Must be the same on both sides."""
        if what in self.seen:
            raise ValueError("seen twice: " + what)
        self.seen[what] = value

    def no_more(self, what, number):
        """Must not be more than the judge's: errors that plain TCP may show too."""
        self.bounded[what] = number

    def figure(self, what, value):
        """Is only printed."""
        self.figures[what] = value

    def demand(self, truth, what):
        """Must hold on either side, whatever the other one saw."""
        if not truth:
            self.complaints.append(what)

    def lifts(self, program, streams=1, fast_bytes=1, heirs=False):
        """The summaries of the program's processes must show so many streams lifted, so many bytes over them. With
        `heirs` the first process does not count: those that it forked or executed have to show it."""
        self.proofs.append((program, streams, fast_bytes, heirs))

    def passes(self, program, least):
        """The summaries must show so many bytes of files passed by reference, where the path can do that."""
        self.passed.append((program, least))

    def stays_on_tcp(self, program, reason):
        """The summaries must give this reason for a stream that is not lifted: nobody takes it for an oversight."""
        self.reasons.append((program, reason))

    # ---- ending -----------------------------------------------------------------------------------

    def ends_with(self, program, pid):
        """A service that has replaced itself: this process of its group is now who has to be asked to end."""
        self.heirs[program] = pid

    def stop(self, program, how=signal.SIGTERM, timeout=10):
        """Ends a service and waits for all its processes: the summaries are written at exit."""
        if program.process.poll() is None:
            program.process.send_signal(how)
        heir = self.heirs.pop(program, None)
        place = getattr(program.process, "place", HERE)
        if heir is not None and place.group_lives(program.process.pid):
            place.kill(heir, how)
        timeout *= sized(1, 5)
        status = program.wait(timeout)
        deadline = time.monotonic() + timeout
        while place.group_lives(program.process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        if place.group_lives(program.process.pid):
            status = "processes left over"
            place.kill(-program.process.pid, signal.SIGKILL)
        return status

    def stop_all(self):
        for program in reversed(self.started):
            status = self.stop(program)
            # 143: socat's word for the same.
            self.demand(status in (0, -signal.SIGTERM, 128 + signal.SIGTERM),
                        "%s ended with %s: %s" % (program.argv[0], status, program.err()[-1500:]))

    def prove(self):
        if self.mode not in pairs.LIFTING:
            return
        if not self.proofs and not self.reasons:
            self.complaints.append("the case names no program whose streams must be lifted, or why they are not")
        for program, streams, fast_bytes, heirs in self.proofs:
            summary = [line for line in program.summary() if not heirs or line["pid"] != program.process.pid]
            count, (fast, slow) = pairs.lifted(summary, (self.mode,)), pairs_net.path_bytes(summary)
            self.figures.setdefault("lifted", []).append("%s:%d" % (program.summary_path.stem[3:], count))
            if count < streams or fast < fast_bytes:
                reasons = sum((collections.Counter(line["not_lifted"]) for line in summary), collections.Counter())
                self.complaints.append(
                    "%s: %d summaries, %d streams lifted of %d, %d bytes not over TCP (%d over it), %s"
                    % (" ".join(program.argv)[:120], len(summary), count, streams, fast, slow, dict(reasons)))

        for program, least in self.passed if self.mode == "shm" else ():
            passed = sum(line["zero_copy_bytes"] for line in program.summary())
            if passed < least:
                self.complaints.append("%s: %d bytes by reference of %d" % (program.argv[0], passed, least))

        for program, reason in self.reasons:
            if not any(reason in line["not_lifted"] for line in program.summary()):
                self.complaints.append("%s: no stream stayed on TCP because of '%s'" % (program.argv[0], reason))

    def logged(self):
        """What the library had to warn of, and the ends of the programs' own errors, for who has to find out."""
        lines = []
        for program in self.started:
            text = program.err()[-800:].strip()
            if text:
                lines.append("[%s] %s" % (program.summary_path.stem, text))
        return "\n".join(lines)[-4000:]


def cpu_of_children():
    """Seconds that all programs which have ended by now computed, the driver's own work not among them."""
    times = os.times()
    return times.children_user + times.children_system


def one_side(case, mode, library, script, place):
    with pairs_net.new_folder("services") as folder:
        side = Side(mode, library, folder, script, place)
        os.chmod(folder, 0o755)  # workers of a service may be another user's
        started, cpu = time.monotonic(), cpu_of_children()
        try:
            case(side)
        except Exception as why:  # whatever it is, the programs are stopped and the other cases run
            side.complaints.append("%s: %s\n%s" % (type(why).__name__, why, traceback.format_exc(limit=-2)))
        finally:
            side.stop_all()
        try:
            side.prove()
        except ValueError as why:
            side.complaints.append(str(why))
        side.figure("seconds", round(time.monotonic() - started, 1))
        side.figure("cpu", round(cpu_of_children() - cpu, 1))
        side.log = side.logged() if side.complaints else ""
        return side


def differences(judge, other):
    found = []
    for what in sorted(judge.seen.keys() | other.seen.keys()):
        ours, theirs = other.seen.get(what, "nothing"), judge.seen.get(what, "nothing")
        if ours != theirs:
            found.append("%s: %s, over TCP %s" % (what, str(ours)[:1000], str(theirs)[:1000]))
    for what, number in other.bounded.items():
        if number > judge.bounded.get(what, 0):
            found.append("%s: %s, over TCP no more than %s" % (what, number, judge.bounded.get(what, 0)))
    return found


def run_case(name, case, library, script, mode="shm", place=HERE):
    sides = [one_side(case, each, library, script, place) for each in (("tcp", mode) if library else ("tcp",))]
    complaints = ["(%s) %s" % (side.mode, text) for side in sides for text in side.complaints]
    if len(sides) == 2:
        complaints += differences(*sides)
    if not sides[0].seen:
        complaints.append("the case compares nothing")
    print("%-18s %-7s %s" % (name, "FAILED" if complaints else "ok",
                             "  ".join("%s %s" % (side.mode, side.figures) for side in sides)), flush=True)
    for text in complaints + [side.log for side in sides if side.log]:
        print("    " + text.replace("\n", "\n    "))
    return not complaints


def main(cases, needs, script, askable=()):
    """`needs` maps each program that has to be installed to its Debian package."""
    if sys.argv[1:2] == [ASK]:
        functions = {function.__name__: function for function in askable}
        print(json.dumps(functions[sys.argv[2]](*sys.argv[3:])))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the services are stopped as well
    parser = argparse.ArgumentParser()
    parser.add_argument("--lib", default=pairs.default_library())
    parser.add_argument("--mode", choices=pairs.LIFTING, default="shm")
    parser.add_argument("--there", metavar="ADDRESS:PORT", help="where places.py waits, on the host of the services")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    options = parser.parse_args()
    unknown = set(options.cases) - set(cases)
    if unknown:
        parser.error("no case " + ", ".join(sorted(unknown)))
    for program, package in needs.items():
        if not shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
            print("skipped: %s is not installed (package %s)" % (program, package))
            return 77
    place = HERE
    if options.there:
        address, port = options.there.rsplit(":", 1)
        place = places.There(address, int(port))
    results = [run_case(name, cases[name], options.lib and os.path.abspath(options.lib), str(script), options.mode, place)
               for name in options.cases or cases]
    return 0 if all(results) else 1


# ---- data ---------------------------------------------------------------------------------------------

def known(seed, size):
    """Bytes that repeat nowhere within reach of a ring, quickly made: a window of the wrong place has another hash."""
    block = hashlib.shake_128(str(seed).encode()).digest(1 << 16)
    out = bytearray()
    turn = 0
    while len(out) < size:
        out += turn.to_bytes(8, "little") + block
        turn += 1
    return bytes(out[:size])


def digest(data):
    return hashlib.sha256(data).hexdigest()


def digest_file(path):
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()
