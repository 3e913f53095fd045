"""A command that runs on a lab's host, seen from the test: the same for guests and for the machine itself."""

import collections
import threading
import time

Result = collections.namedtuple("Result", "rc out err")


class LabTimeout(Exception):
    """A command (or a boot) took longer than it was given. Has the output so far."""


class HostDown(Exception):
    """The host is off, or went off while a command ran."""


class Unsupported(Exception):
    """This host does not do that: it is the machine itself, and others use it."""


class Process:
    """Made by Host.start. `_send` carries out kill, write and close; `_started`, `_arrived` and `_finished` are called
    by the host's thread. All else may be called from any thread.
    """

    def __init__(self, cmd, send, on_output=None):
        self.cmd = cmd
        self.pid = None
        self.rc = None
        self._send = send
        self._on_output = on_output
        self._bytes = {1: bytearray(), 2: bytearray()}
        self._down = None
        self._changed = threading.Condition()

    def wait(self, timeout=60):
        """The status, as a shell says it (137 after SIGKILL)."""
        self.wait_for(lambda: self.rc is not None, timeout, f"`{self.cmd}` has not ended")
        return self.rc

    def wait_output(self, text, timeout=60):
        """Waits until the command has printed `text`; ends early, with False, when it has ended without."""
        self.wait_for(lambda: text in self.output() or self.rc is not None, timeout,
                      f"`{self.cmd}` has not printed '{text}'")
        return text in self.output()

    def wait_for(self, condition, timeout, complaint):
        limit = time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self._down:
                    raise HostDown(f"{self._down}: `{self.cmd}`")
                left = limit - time.monotonic()
                if left <= 0:
                    printed = self.output()[-1000:] + self.errors()[-1000:]
                    raise LabTimeout(f"{complaint} after {timeout} s; it printed: {printed}")
                self._changed.wait(left)

    def output(self):
        with self._changed:
            return self._bytes[1].decode(errors="replace")

    def errors(self):
        with self._changed:
            return self._bytes[2].decode(errors="replace")

    def result(self, timeout=60):
        return Result(self.wait(timeout), self.output(), self.errors())

    def kill(self, sig=9):
        """To the command and its children (its process group)."""
        if self.rc is None:
            self._send("kill", sig=int(sig))

    def write(self, data):
        data = data.encode() if isinstance(data, str) else data
        for at in range(0, len(data), 32768):  # short orders: others get their turn in between
            self._send("write", data=data[at:at + 32768])

    def close_input(self):
        self._send("close")

    def _started(self, pid):
        with self._changed:
            self.pid = pid
            self._changed.notify_all()

    def _arrived(self, fd, data):
        with self._changed:
            self._bytes[fd] += data
            self._changed.notify_all()
        if self._on_output:
            self._on_output(fd, data)

    def _finished(self, rc=None, down=None):
        with self._changed:
            if self.rc is None:
                self.rc, self._down = rc, down
            self._changed.notify_all()


class HostCalls:
    """What follows from `start` alone."""

    def run(self, cmd, timeout=60, **options):
        """Runs a shell command to its end. Past the time-out it is killed, and LabTimeout raised."""
        process = self.start(cmd, **options)
        try:
            return process.result(timeout)
        except LabTimeout:
            process.kill(9)
            raise

    def check(self, cmd, timeout=60, **options):
        """run, for commands that must succeed; returns what they print."""
        result = self.run(cmd, timeout, **options)
        if result.rc:
            raise RuntimeError(f"{self.name}: `{cmd}` ended with {result.rc}: {result.out[-500:]}{result.err[-500:]}")
        return result.out
