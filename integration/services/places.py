#!/usr/bin/env python3
"""Where a service runs: on this host, or on another one that its drivers reach.

  places.py ADDRESS PORT          (on the other host) starts and watches services for the driver that connects

A driver starts its clients itself, always. Services it starts at a place: Here, or There(address, port), which does the same
by requests, one JSON line each, to the program above. Both see the driver's folder under the same name.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys


def group_of(stat):
    """The process group of a process that runs, from its file in /proc; None of one that is gone, or only waits to
    be reaped."""
    try:
        state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state in "ZX" else int(group)


class Here:
    """Processes of this host, by their ids."""

    def __init__(self):
        self._children = {}

    def start(self, argv, env, cwd, out, err):
        with open(out, "wb") as out, open(err, "wb") as err:
            process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=cwd,
                                       start_new_session=True)
        self._children[process.pid] = process
        return process.pid

    def wait(self, pid, timeout):
        """The status; None when it has not ended."""
        try:
            return self._children[pid].wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, pid, sig):
        """A process; a negative id is a group."""
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            pass

    def lives(self, pid):
        return group_of(pathlib.Path("/proc/%d/stat" % pid)) is not None

    def group_lives(self, group):
        """Whether a process of the group still runs."""
        return any(group_of(stat) == group for stat in pathlib.Path("/proc").glob("[0-9]*/stat"))

    def children(self, pid):
        try:
            return pathlib.Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()
        except OSError:
            return []

    def listens(self, port):
        """Whether a TCP socket listens on the port, seen from outside: no connection is made."""
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[1].endswith(":%04X" % port):
                    return True
        return False

    def end_all(self):
        """What its driver left behind goes, with what that forked."""
        for pid in self._children:
            self.kill(-pid, signal.SIGKILL)


class There:
    """The same on another host."""

    def __init__(self, address, port):
        self._socket = socket.create_connection((address, port), timeout=120)
        self._lines = self._socket.makefile("r")

    def __getattr__(self, name):
        def call(*arguments):
            self._socket.sendall(json.dumps([name, arguments]).encode() + b"\n")
            answer = json.loads(self._lines.readline())
            if "error" in answer:
                raise RuntimeError("%s at the service's host: %s" % (name, answer["error"]))
            return answer["result"]
        return call


class Process:
    """As much of subprocess.Popen as services need, wherever they run."""

    def __init__(self, place, argv, env, cwd, out, err):
        self.place, self.args = place, argv
        self.pid = place.start(argv, env, str(cwd), str(out), str(err))
        self.returncode = None

    def poll(self):
        return self._look(0)

    def _look(self, timeout):
        if self.returncode is None:
            self.returncode = self.place.wait(self.pid, timeout)
        return self.returncode

    def wait(self, timeout=None):
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, sig):
        if self.poll() is None:
            self.place.kill(self.pid, int(sig))

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def serve(address, port):
    listener = socket.create_server((address, port))
    while True:
        connection, _ = listener.accept()
        here = Here()
        with connection, connection.makefile("r") as lines:
            for line in lines:
                name, arguments = json.loads(line)
                try:
                    answer = {"result": getattr(here, name)(*arguments)}
                except (OSError, KeyError, TypeError) as why:
                    answer = {"error": "%s: %s" % (type(why).__name__, why)}
                connection.sendall(json.dumps(answer).encode() + b"\n")
        here.end_all()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
