"""Ports and servers for the drivers that run real programs (iperf3, sockperf) instead of pairs."""

import pathlib
import random
import socket
import subprocess
import tempfile
import time

import pairs

LOWEST_PORT, HIGHEST_PORT = 20000, 32000  # below the range that the kernel gives to clients


def free_port(kind=socket.SOCK_STREAM):
    """A port that nobody listens on now; programs that lose the race for it are started again."""
    for _ in range(200):
        port = random.randrange(LOWEST_PORT, HIGHEST_PORT)
        with socket.socket(socket.AF_INET6, kind) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            try:
                probe.bind(("::", port))
                return port
            except OSError:
                continue
    raise SystemExit("no free port")


def listens(port):
    """Whether a TCP socket listens on the port, seen from outside: no connection is made."""
    wanted = ":%04X" % port
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[1].endswith(wanted):
                return True
    return False


class Program:
    """A running program with its output in files and, if preloaded, a summary."""

    def __init__(self, argv, mode, role, library, folder, name, extra=None, stdin=subprocess.DEVNULL, start=None):
        """start: how, where it is not a child of ours (argv, environment, folder, files for output and errors)."""
        self.argv, self.role, self.mode = argv, role, mode
        base = pathlib.Path(folder, name)
        self.summary_path = base.with_suffix(".json")
        self.log_path = pathlib.Path(str(self.summary_path) + ".log")
        self.out_path, self.err_path = base.with_suffix(".out"), base.with_suffix(".err")
        if role in pairs.PRELOADED[mode]:
            # Who writes them may be another user by then: servers change theirs.
            for path in (self.summary_path, self.log_path):
                path.touch()
                path.chmod(0o666)
        env = pairs.role_environment(mode, role, library, self.summary_path)
        env.update(extra or {})
        if start:
            self.process = start(argv, env, folder, self.out_path, self.err_path)
            return
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(argv, env=env, stdin=stdin, stdout=out,
                                            stderr=err, start_new_session=True, cwd=folder)

    @property
    def preloaded(self):
        return self.role in pairs.PRELOADED[self.mode]

    def wait(self, timeout):
        """The exit status, or "hung" after the program had to be killed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "hung"

    def stop(self, timeout=5):
        """Asks a server to end; returns its status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.wait(timeout)

    def out(self):
        return self.out_path.read_text(errors="replace")

    def err(self):
        text = self.err_path.read_text(errors="replace")
        return text + (self.log_path.read_text(errors="replace") if self.log_path.exists() else "")

    def summary(self):
        return pairs.read_summary(self.summary_path)


def start_listening(argv_of_port, mode, library, folder, name, tries=5, extra=None, start=None, listens=listens):
    """Starts a server on a free port and waits until it listens: (program, port)."""
    for attempt in range(tries):
        port = free_port()
        server = Program(argv_of_port(port), mode, "server", library, folder,
                         "%s-%d" % (name, attempt), extra, start=start)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and server.process.poll() is None:
            if listens(port):
                return server, port
            time.sleep(0.01)
        server.stop()
    raise RuntimeError("%s does not listen: %s" % (name, server.err() or server.out()))


def path_bytes(summary):
    """(bytes over the new paths, bytes over TCP), both directions, of all lines."""
    fast = sum(line[way][path] for line in summary for way in ("bytes_sent", "bytes_received")
               for path in ("shm", "rdma"))
    slow = sum(line[way]["tcp"] for line in summary for way in ("bytes_sent", "bytes_received"))
    return fast, slow


def new_folder(name):
    return tempfile.TemporaryDirectory(prefix="rsock-%s-" % name)
