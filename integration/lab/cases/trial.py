"""What a case of the lab works with: programs on two hosts, with or without the shim, and what the shim says of them.

    group = Group(TWO_HOSTS)

    @group.case()
    def one_flow(t):
        server = t.start(t.server, f"iperf3 -s -1 -p {t.port}", listens=True)
        ...
        t.expect("the client ends well", t.finish(client) == 0, client)
        t.expect_lifted(client)

A complaint doesn't end a case: what else is wrong is of use. `t.rdma` is False under --path tcp, the judge: then the same
must come out, and nothing may be lifted.
"""

import dataclasses
import importlib.machinery
import importlib.util
import json
import pathlib
import shlex
import sys
import time

INTEGRATION = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(INTEGRATION / "lib"), str(INTEGRATION.parent / "scripts/lib")]
import pairs  # noqa: E402
from lab import HostDown, LabTimeout, Unsupported  # noqa: E402

WAYS = ("bytes_sent", "bytes_received")
# In `not_lifted`: of streams that were small or short, which says nothing of those that were not.
NO_REASON = {"below the threshold", "over before it was lifted"}


@dataclasses.dataclass(frozen=True)
class LabKind:
    """guests: the cases break things, or need what this machine may not have."""
    hosts: int = 2
    rdma_modules: bool = True
    rdma_libs: bool = True
    guests: bool = True


TWO_HOSTS = LabKind()
ONE_HOST = LabKind(hosts=1)


@dataclasses.dataclass
class Case:
    name: str
    body: object
    kind: LabKind
    spoils: bool  # the lab is of no use afterwards
    beside: bool  # it mostly waits, and changes nothing that others see: may run beside others of its lab


class Group:
    def __init__(self, kind):
        self.kind, self.cases = kind, {}

    def add(self, name, body, kind=None, spoils=False, beside=False):
        self.cases[name] = Case(name, body, kind or self.kind, spoils, beside)

    def case(self, **options):
        def register(body):
            self.add(body.__name__, body, **options)
            return body
        return register


def script(name):
    """A driver of this folder's neighbours as a module: they have no suffix."""
    loader = importlib.machinery.SourceFileLoader(name, str(INTEGRATION / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


class Program:
    """A program on a host. Summary and log lie in the host's results, which both sides see."""

    def __init__(self, trial, host, command, name, shim, process):
        self.trial, self.host, self.command, self.name, self.shim, self.process = \
            trial, host, command, name, shim, process
        self.summary_file = pathlib.Path(host.results, name + ".json")
        self.log_file = pathlib.Path(host.results, name + ".log")
        self.folder, self.broken = host.results, ""

    @property
    def out(self):
        return self.process.output()

    @property
    def err(self):
        return self.process.errors()

    def fetch(self):
        """What another user has written comes from where that user may write."""
        if self.folder != self.host.results:
            self.host.run(f"cp {self.folder}/{self.name}.* {self.host.results}/")

    def summary(self):
        try:
            self.fetch()
            return pairs.read_summary(self.summary_file)
        except (ValueError, OSError) as why:
            self.broken = str(why)
            return []

    def total(self, group, key):
        return sum(line[group].get(key, 0) for line in self.summary())

    def reasons(self, group="not_lifted"):
        found = {}
        for line in self.summary():
            for reason, n in line.get(group, {}).items():
                found[reason] = found.get(reason, 0) + n
        return found

    def set_down(self):
        return sum(line["set_down"] for line in self.summary())

    def log(self):
        self.fetch()
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def lifts_so_far(self):
        """While it runs; the summary comes at its end."""
        return self.log().count(": on RDMA")

    def describe(self):
        parts = [f"--- {self.name} on {self.host.name}{'' if self.shim else ' (plain)'}: {self.command}",
                 f"status {self.process.rc}"]
        parts += [self.out[-700:].rstrip(), self.err[-700:].rstrip()]
        parts += ["summary: " + json.dumps(line) for line in self.summary()[-3:]]
        parts += [self.broken] if self.broken else []
        parts += ["log: " + line for line in self.log().splitlines()[-15:]]
        return "\n".join(p for p in parts if p)


class Trial:
    """One run of one case."""

    def __init__(self, lab, options, number):
        self.lab, self.options = lab, options
        self.server, self.client = lab.hosts[0], lab.hosts[-1]
        self.rdma = options.path == "rdma"
        self.port = 21000 + number * 10
        self.complaints, self.programs, self.note = [], [], ""
        self._number = number

    def expect(self, what, true, seen=""):
        if not true:
            self.complaints.append(f"expected: {what}; seen: {seen}")
        return true

    # --- programs ------------------------------------------------------------------------------------------------

    def tool(self, name):
        return str(pathlib.Path(self.options.build_dir, "integration/lab", name))

    def hash_pair(self):
        return str(pathlib.Path(self.options.build_dir, "integration/hash_pair"))

    def start(self, host, command, shim=True, strict=True, path=None, env=None, listens=None, **options):
        """`path` overrides what the run is about (auto in cases about falling back). listens: a port, or True: ours."""
        name = f"{self._number}-{len(self.programs)}-{pathlib.Path(command.split()[0]).name}"
        words = dict(env or {})
        folder = "/dev/shm" if "user" in options else host.results
        if shim:
            words |= {"LD_PRELOAD": self.options.library, "RSOCK_SUMMARY": f"{folder}/{name}.json",
                      "RSOCK_LOG": self.options.log, "RSOCK_LOG_FILE": f"{folder}/{name}.log",
                      "RSOCK_PATH": path if path and self.rdma else self.options.path} | words
            if strict:
                words["RSOCK_STRICT"] = "1"
        # Neither the shell nor env is preloaded, and the pid is the program's own.
        line = " ".join(["exec env", *(shlex.quote(f"{k}={v}") for k, v in words.items()), command])
        program = Program(self, host, command, name, shim, host.start(line, **options))
        program.folder = folder
        self.programs.append(program)
        if listens:
            self.wait_listening(program, self.port if listens is True else listens)
        return program

    def wait_listening(self, program, port):
        # Seen from outside: no connection is made. The remote address of a listening socket is all zeros.
        look = f"grep -qi ':{port:04x} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6"
        tries = f"for i in $(seq 100); do {look} && exit 0; sleep 0.1; done; exit 1"
        if program.host.run(tries, 30).rc:
            self.expect(f"{program.name} listens at {port}", False, program.err or program.out)

    def finish(self, program, timeout=60):
        """The status, or "hung", which is a complaint, after which it is killed."""
        try:
            return program.process.wait(timeout)
        except LabTimeout:
            self.complaints.append(f"{program.name} has not ended after {timeout} s")
            program.process.kill(9)
            program.process.wait(20)
            return "hung"

    def stop(self, program, sig=15, timeout=20):
        program.process.kill(sig)
        return self.finish(program, timeout)

    def end_all(self):
        """What a case has left running goes."""
        for program in self.programs:
            try:
                if program.process.rc is None:
                    program.process.kill(9)
                    program.process.wait(20)
            except (HostDown, LabTimeout):
                pass

    # --- what the shim says --------------------------------------------------------------------------------------

    def expect_lifted(self, *programs, streams=1, share=0.0):
        """Each says so: so many streams, and bytes on the path; `share`: so much of all bytes."""
        for program in programs:
            if not program.shim:
                continue
            lines = program.summary()
            if not self.expect(f"{program.name} writes a summary", lines, program.broken or "none"):
                continue
            if not self.rdma:
                self.expect_on_tcp(program)
                continue
            count, fast = program.total("lifted", "rdma"), sum(program.total(w, "rdma") for w in WAYS)
            slow = sum(program.total(w, "tcp") for w in WAYS)
            self.expect(f"{program.name} lifts {streams} streams", count >= streams,
                        f"{count}; {program.reasons()}")
            self.expect(f"{program.name} has bytes on rdma", fast > share * (fast + slow), f"rdma {fast}, tcp {slow}")
            self.expect("shm is not used between hosts", program.total("lifted", "shm") == 0, lines)
            self.note += f" {100 * fast // max(1, fast + slow)}%"

    def expect_lifts(self, program, count, seconds):
        """So many streams are lifted while it runs. The judge has nothing to wait for but traffic."""
        lifted = self.rdma and wait_until(lambda: program.lifts_so_far() >= count, seconds)
        time.sleep(1 if self.rdma else 3)
        self.expect(f"{count} streams of {program.name} are lifted within {seconds} s", lifted or not self.rdma,
                    program.log()[-500:])

    def expect_on_tcp(self, *programs):
        for program in programs:
            if program.shim:
                fast = sum(program.total(w, p) for w in WAYS for p in ("rdma", "shm"))
                count = pairs.lifted(program.summary())
                self.expect(f"{program.name} lifts nothing", count == 0 and fast == 0, f"{count} streams, {fast} bytes")

    def expect_bytes(self, program, sent=None, received=None):
        """The shim's own count of all paths. RSOCK_PATH=tcp counts nothing."""
        if not program.shim or not self.rdma:
            return
        for way, wanted in zip(WAYS, (sent, received)):
            if wanted is not None:
                seen = sum(program.total(way, path) for path in ("tcp", "shm", "rdma"))
                self.expect(f"{program.name} counts {wanted} {way}", seen == wanted, f"{seen} ({seen - wanted:+})")


def wait_until(condition, seconds, step=0.2):
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(step)
    return True


__all__ = ["Group", "LabKind", "TWO_HOSTS", "ONE_HOST", "Trial", "Program", "HostDown", "LabTimeout", "Unsupported",
           "script", "wait_until", "INTEGRATION"]
