"""Starts servers and clients for a measurement, and leaves nothing behind.

Every process is started by us, on a port that was free, and is ended by its pid: also on ^C, on
SIGTERM, and when this script itself is killed. Nothing outlives the Runner's `with` block.
"""

import ctypes
import glob
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class RunError(Exception):
    """A run that gave no figure; the text says which and why."""


class Variant:
    """One way to run the same program: plain, with the library and a path, or with something else for comparison."""

    def __init__(self, name, env=None, lifts_to=None, other=False):
        self.name = name
        self.env = dict(env or {})
        self.lifts_to = lifts_to  # the path that the summary must prove, or None
        self.other = other        # not ours: its failures are shown, and are no fault of the run

    @staticmethod
    def plain(name="tcp"):
        return Variant(name)

    @staticmethod
    def shim(library, path, name=None, extra=None):
        env = {"LD_PRELOAD": library, "RSOCK_PATH": path}
        env.update(extra or {})
        return Variant(name or path, env, None if path == "tcp" else path)

    @staticmethod
    def rspreload():
        """Sockets of rdma-core, preloaded; None where they are not installed."""
        found = sorted(glob.glob("/usr/lib/*/rsocket/librspreload.so*") + glob.glob("/usr/lib*/rsocket/librspreload.so*"))
        return Variant("rspreload", {"LD_PRELOAD": found[0]}, other=True) if found else None


class Result:
    """What a server and its client left: output, pids, and the summary file's text (or texts, by role); where they ran
    here, the CPU time of both from start to end.
    """

    def __init__(self, client_out, server_out, pids, summary_text, observed=None, cpu_seconds=None):
        self.client_out = client_out
        self.server_out = server_out
        self.pids = pids
        self.summary_text = summary_text
        self.observed = observed
        self.cpu_seconds = cpu_seconds

    def client_json(self):
        try:
            return json.loads(self.client_out)
        except ValueError:
            raise RunError("the client printed no JSON: " + tail(self.client_out)) from None


def tail(text, limit=300):
    text = " ".join(text.split())
    return text if len(text) <= limit else "…" + text[-limit:]


def environment(variant, summary):
    """The caller's environment without a shim; for shim runs, with theirs.

    RSOCK_ variables that the caller set (to tune) reach the shim runs only.
    """
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    if "LD_PRELOAD" in variant.env:
        env.update(variant.env)
        env["RSOCK_SUMMARY"] = summary
    else:
        env = {k: v for k, v in env.items() if not k.startswith("RSOCK_")}
        env.update(variant.env)
    return env


def ended_seconds():
    """CPU time of all our processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def free_port(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def is_listening(port):
    """Looks into the kernel's tables: a probing connect would be taken for a client."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    fields = line.split()
                    if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                        return True
        except (OSError, StopIteration):
            pass
    return False


class Runner:
    def __init__(self, address="127.0.0.1"):
        self.address = address
        self.folder = None
        self.files = None  # a folder within it, of what file() made
        self._live = []
        self._count = 0
        self._old_handler = None

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="rsock-measure-", dir=_folder_on_disk())
        self.files = os.path.join(self.folder, "files")
        os.mkdir(self.files)
        # SIGTERM ends us as ^C does: through the `with` block's exit.
        self._old_handler = signal.signal(signal.SIGTERM, _raise_interrupt)
        return self

    def __exit__(self, *_):
        # A second ^C while we clean up must not leave half of it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        old_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for process in list(self._live):
                self._stop(process)
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, old_interrupt)
            signal.signal(signal.SIGTERM, self._old_handler)

    def free_port(self):
        return free_port(self.address)

    def file(self, size):
        """The path of a file of so many bytes, named after that number, for programs that send files. Made once, on a
        real file system, and written back before anybody measures.
        """
        path = os.path.join(self.files, str(size))
        if not os.path.exists(path):
            block = os.urandom(1 << 20)
            with open(path, "wb") as file:
                for offset in range(0, size, len(block)):
                    file.write(block[:size - offset])
                file.flush()
                os.fsync(file.fileno())
        return path

    def pair(self, variant, server, client, seconds):
        """Runs a server and a client to their ends and returns a Result.

        server(port_file) and client(port) return command lines. When server() uses the port file
        the port is read from there; otherwise it has an attribute `port`.
        """
        self._count += 1
        base = os.path.join(self.folder, str(self._count))
        summary, port_file = base + ".summary", base + ".port"
        env = environment(variant, summary)
        limit = time.monotonic() + seconds + 20
        server_argv, port = server(port_file)
        before = ended_seconds()
        server_process = self._start(server_argv, env, base + ".server")
        try:
            port = self._wait_for_port(server_process, port, port_file)
            client_process = self._start(client(port), env, base + ".client")
            try:
                client_out = self._finish(client_process, limit, "client")
            finally:
                self._stop(client_process)
            # Both ends of a finished run end on their own; the server needs a moment to write
            # its summary.
            server_out = self._finish(server_process, limit, "server")
        finally:
            self._stop(server_process)
        pids = {"server": server_process.pid, "client": client_process.pid}
        return Result(client_out, server_out, pids, read(summary), cpu_seconds=ended_seconds() - before)

    def single(self, variant, argv, seconds):
        """Runs one program to its end and returns the JSON it prints."""
        self._count += 1
        base = os.path.join(self.folder, str(self._count))
        env = environment(variant, base + ".summary")
        process = self._start(argv, env, base + ".out")
        try:
            out = self._finish(process, time.monotonic() + seconds + 20, argv[0])
        finally:
            self._stop(process)
        return Result(out, "", {}, "").client_json()

    def start(self, argv, env, role, stdin=subprocess.DEVNULL):
        """One more process, for who needs more than a pair: finish() or stop() it."""
        self._count += 1
        return self._start(argv, env, os.path.join(self.folder, f"{self._count}.{role}"), stdin)

    def finish(self, process, seconds, role):
        """Its output, once it has ended."""
        try:
            return self._finish(process, time.monotonic() + seconds, role)
        finally:
            self._stop(process)

    def wait_for_port(self, process, port):
        return self._wait_for_port(process, port, None)

    def stop(self, process):
        self._stop(process)

    # ---- processes ------------------------------------------------------------------------------

    def _start(self, argv, env, base, stdin=subprocess.DEVNULL):
        with open(base + ".stdout", "wb") as out, open(base + ".stderr", "wb") as err:
            try:
                process = subprocess.Popen(
                    argv, stdin=stdin, stdout=out, stderr=err, env=env,
                    preexec_fn=_in_child)
            except OSError as error:
                raise RunError(f"{argv[0]}: {error.strerror}") from None
        process.base = base
        process.title = " ".join([os.path.basename(argv[0])] + argv[1:])
        self._live.append(process)
        return process

    def _finish(self, process, limit, role):
        try:
            status = process.wait(timeout=max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RunError(f"the {role} did not end in time ({process.title})") from None
        out = read(process.base + ".stdout")
        if status != 0:
            how = f"status {status}" if status > 0 else signal.Signals(-status).name
            said = read(process.base + ".stderr") or out
            raise RunError(f"the {role} ended with {how} ({process.title}): {tail(said)}")
        return out

    def _wait_for_port(self, process, port, port_file):
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            if port is None:
                text = read(port_file)
                if text:
                    return int(text)
            elif is_listening(port):
                return port
            if process.poll() is not None:
                said = read(process.base + ".stderr") or read(process.base + ".stdout")
                raise RunError(f"the server ended at once ({process.title}): {tail(said)}")
            time.sleep(0.005)
        raise RunError(f"the server does not listen ({process.title})")

    def _stop(self, process):
        """Ends one process that we started, kindly and then for certain."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process in self._live:
            self._live.remove(process)


def filesystem(path):
    """The kind of the file system that a path is on ("ext4"), or "" where the kernel's list does not tell."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in read("/proc/self/mountinfo").splitlines():
        if line.split()[2] == number:
            return line.partition(" - ")[2].split()[0]
    return ""


def _folder_on_disk():
    """The usual one, unless that is memory only: what is sent from files there is not what users send."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/var/tmp"):
        if os.access(folder, os.W_OK) and filesystem(folder) != "tmpfs":
            return folder
    return usual


def _in_child():
    # Own process group: the terminal's ^C reaches us only, and we end the children in order.
    os.setpgid(0, 0)
    # And should we be killed without a chance to clean up, the kernel ends them.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _raise_interrupt(*_):
    raise KeyboardInterrupt


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
