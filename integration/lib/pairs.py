"""Starting the two roles of a program with and without the shim, and reading what the shim says.

The drivers of this folder share this file.  It never preloads anything into the driver itself: the
shim goes into the environment of the roles that the mode names, and of nothing else.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MODES = ("tcp", "shm", "rdma", "server-only", "client-only")
HERE = tuple(mode for mode in MODES if mode != "rdma")  # what needs no RDMA device
PRELOADED = {
    "tcp": (),
    "shm": ("server", "client"),
    "rdma": ("server", "client"),
    "server-only": ("server",),
    "client-only": ("client",),
}
LIFTING = ("shm", "rdma")  # each is the name of its path, too
# In these modes no stream can be lifted.
ONE_SIDED = ("server-only", "client-only")


def default_library():
    """The library under test, or None where it has not been built yet."""
    named = os.environ.get("LIBRSOCK")
    if named:
        return named
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "librsock.so"
    return str(built) if built.exists() else None


def plain_environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith("RSOCK_")}
    env.pop("LD_PRELOAD", None)
    env["LC_ALL"] = "C"
    return env


def shim_environment(library, summary, strict, path="shm"):
    env = plain_environment()
    # A sanitizer's run-time, where the library is built with one, comes before everything else.
    env["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("PRELOAD_FIRST"), library]))
    env["RSOCK_PATH"] = path
    env["RSOCK_SUMMARY"] = str(summary)
    env["RSOCK_LOG"] = os.environ.get("RSOCK_LOG", "warn")
    env["RSOCK_LOG_FILE"] = str(summary) + ".log"
    if strict:
        env["RSOCK_STRICT"] = "1"
    return env


def role_environment(mode, role, library, summary):
    if role not in PRELOADED[mode]:
        return plain_environment()
    if not library:
        raise SystemExit("mode %s needs the library: set LIBRSOCK" % mode)
    # Strict mode gives a lift five seconds. Emulated hosts take what they take: there the summaries alone decide.
    env = shim_environment(library, summary, strict=mode == "shm", path=mode if mode in LIFTING else "shm")
    if mode in LIFTING:
        env["PAIR_LIFT_MS"] = {"shm": "5000", "rdma": "30000"}[mode]
    return env


SUMMARY_KEYS = {
    "pid": int, "exe": str, "streams": int, "lifted": dict, "set_down": int, "bytes_sent": dict,
    "bytes_received": dict, "zero_copy_bytes": int, "not_lifted": dict,
}


def read_summary(path):
    """All lines of a summary file; a line that breaks the contract is an error."""
    lines = []
    path = pathlib.Path(path)
    if not path.exists():
        return lines
    for text in path.read_text().splitlines():
        line = json.loads(text)
        for key, kind in SUMMARY_KEYS.items():
            if not isinstance(line.get(key), kind):
                raise ValueError("summary: %s missing or no %s: %s" % (key, kind.__name__, text))
        for group in ("lifted", "bytes_sent", "bytes_received"):
            for name in ("shm", "rdma") + (() if group == "lifted" else ("tcp",)):
                if not isinstance(line[group].get(name), int) or line[group][name] < 0:
                    raise ValueError("summary: bad %s.%s: %s" % (group, name, text))
        lines.append(line)
    return lines


def lifted(lines, paths=LIFTING):
    return sum(line["lifted"][path] for line in lines for path in paths)


@dataclasses.dataclass
class Role:
    """What one role of a run left behind."""
    name: str
    out: str
    err: str
    status: object  # exit code, "signal N" or "hung"
    summary: list
    log: str
    broken: str = ""  # why the summary could not be read

    @property
    def failed(self):
        return self.status in (2, 98, 99, "hung") or "FAILED" in self.out


@dataclasses.dataclass
class Run:
    mode: str
    server: Role
    client: Role
    seconds: float

    def roles(self):
        return (self.server, self.client)


def _status(process):
    code = process.returncode
    return "signal %s" % signal.Signals(-code).name if code < 0 else code


def _reap(processes, deadline):
    """Waits for every role until the deadline; returns the names of those that hung."""
    hung = []
    for name, process in processes.items():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung.append(name)
    for process in processes.values():
        try:  # the group: what a role forked must not outlive the run
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return hung


def run_pair(commands, mode, library, timeout, extra=None):
    """Runs {"server": argv, "client": argv} joined by a control channel; `extra` adds to the
    environment of both."""
    folder = tempfile.mkdtemp(prefix="rsock-pair-")
    ends = dict(zip(("server", "client"), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
    processes, files = {}, {}
    start = time.monotonic()
    try:
        for role, argv in commands.items():
            summary = os.path.join(folder, role + ".json")
            env = role_environment(mode, role, library, summary)
            env["PAIR_CONTROL_FD"] = str(ends[role].fileno())
            env["TMPDIR"] = folder
            env.update(extra or {})
            files[role] = [open(os.path.join(folder, role + end), "w+b") for end in (".out", ".err")]
            processes[role] = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=files[role][0],
                stderr=files[role][1], pass_fds=[ends[role].fileno()], start_new_session=True,
                cwd=folder)
        for end in ends.values():
            end.close()
        hung = _reap(processes, start + timeout)
        seconds = time.monotonic() - start
        roles = {}
        for role, process in processes.items():
            out, err = (pathlib.Path(f.name).read_text(errors="replace") for f in files[role])
            log = pathlib.Path(folder, role + ".json.log")
            roles[role] = Role(role, out, err, "hung" if role in hung else _status(process), [],
                               log.read_text(errors="replace") if log.exists() else "")
            try:
                roles[role].summary = read_summary(os.path.join(folder, role + ".json"))
            except ValueError as why:
                roles[role].broken = str(why)
        return Run(mode, roles["server"], roles["client"], seconds)
    finally:
        for pair in files.values():
            for file in pair:
                file.close()
        for end in ends.values():
            end.close()
        shutil.rmtree(folder, ignore_errors=True)


def lift_complaints(run, expect_lift, both=False, execs=False, alone=False):
    """What the summaries of a run say that they should not.

    Every preloaded end that did not die by a signal, nor (with `execs`) became another program, writes
    a summary.  Without a preloaded peer it lifts nothing, unless (`alone`) it is its own peer.  In modes shm and rdma one
    end's word is enough that the stream was lifted onto that path, because the other may have been killed or replaced;
    with `both`, each has to say it.
    """
    complaints, reasons, counts = [], {}, []
    for role in run.roles():
        if role.name not in PRELOADED[run.mode]:
            continue
        if role.broken:
            complaints.append("%s: %s" % (role.name, role.broken))
        elif not role.summary and not isinstance(role.status, str) and not execs:
            complaints.append("%s wrote no summary" % role.name)
        if not role.summary:
            continue
        counts.append(lifted(role.summary, (run.mode,) if run.mode in LIFTING else LIFTING))
        if run.mode in ONE_SIDED and counts[-1] and not alone:
            complaints.append("%s lifted %d streams with nobody at the other end"
                              % (role.name, counts[-1]))
        for line in role.summary:
            for reason, n in line["not_lifted"].items():
                reasons[reason] = reasons.get(reason, 0) + n
    if run.mode in LIFTING and expect_lift and counts and not (all if both else any)(counts):
        complaints.append("lifted by the ends: %s; %s" % (counts, reasons or "no reason given"))
    return complaints


def list_variants(program):
    """[(variant, its flags)] of a program built on pair.h; the flags are "lifts", "execs" and "alone"."""
    text = subprocess.run([program, "list"], env=plain_environment(), capture_output=True,
                          text=True, timeout=10, check=True).stdout
    return [(line.split()[0], set(line.split()[1:])) for line in text.splitlines()]


def describe(run):
    """Everything about a run, for a person who has to find out what went wrong."""
    parts = []
    for role in run.roles():
        parts.append("--- %s (%s): %s" % (role.name, run.mode, role.status))
        parts.append(role.out.rstrip())
        if role.err.strip():
            parts.append("stderr: " + role.err.strip()[-2000:])
        if role.log.strip():
            parts.append("log: " + role.log.strip()[-2000:])
    return "\n".join(parts)


def python():
    """The interpreter itself, never a wrapper script that would be preloaded in its place."""
    return sys.executable
