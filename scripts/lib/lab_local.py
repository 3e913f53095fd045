"""A lab's host that is this machine itself, for machines that have an RDMA device.

Both hosts of a lab are then the same one: what runs between them goes through the device's own loopback. Others use the
machine, so whatever would break it (netem, links, the device, the plug) raises Unsupported, which a test shows as a
skip. Nothing is isolated: ports and files are the test's own care.
"""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import threading

from lab_process import HostCalls, Process, Unsupported

DEVICES = pathlib.Path("/sys/class/infiniband")
CLOSED_GRACE = 1  # seconds for output that a command's children still hold open


def _addresses(netdev):
    argv = ["ip", "-j", "addr", "show", "dev", netdev]
    try:
        shown = json.loads(subprocess.run(argv, capture_output=True, timeout=10).stdout or "[]")
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return {a["family"]: a["local"] for d in shown for a in d.get("addr_info", []) if a.get("scope") == "global"}


def rdma_address():
    """(RDMA device, network device, IPv4, IPv6 or None) of the first device that has an address, or None."""
    for device in sorted(DEVICES.glob("*")):
        # Ethernet devices say which netdev is behind a GID; for InfiniBand it is the PCI device's (IPoIB).
        names = {p.read_text().strip() for p in _readable(device.glob("ports/*/gid_attrs/ndevs/*"))}
        names |= {p.name for p in device.glob("device/net/*")}
        for name in sorted(names):
            found = _addresses(name)
            if "inet" in found:
                return device.name, name, found["inet"], found.get("inet6")
    return None


def _readable(paths):
    for path in paths:
        try:
            path.read_text()
            yield path
        except OSError:  # an empty place of the table
            pass


class LocalHost(HostCalls):
    def __init__(self, number, folder, where):
        self.name = f"host{number}"
        self.rdma_device, self.device, self.address, self.address6 = where
        self.peer_address = None
        self.results = str(pathlib.Path(folder) / "results")
        self._live = {}
        os.makedirs(self.results)

    def start(self, cmd, env=None, cwd=None, memlock=None, user=None, stdin=False, pty=None, on_output=None):
        def limits():
            if memlock is not None:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

        if pty:
            raise Unsupported("this machine has shells of its own")
        full = {n: os.environ[n] for n in ("PATH", "HOME") if n in os.environ} | {"LANG": "C.UTF-8"} | (env or {})
        options = {} if user is None else dict(user=user, group=user, extra_groups=[])
        options |= dict(stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE, bufsize=0, start_new_session=True, preexec_fn=limits)
        child = subprocess.Popen(["/bin/bash", "-c", cmd], env=full, cwd=cwd or "/", **options)
        process = Process(cmd, lambda op, **more: _order(child, op, more), on_output)
        process._started(child.pid)
        self._live[child.pid] = process
        readers = [threading.Thread(target=_read, args=(process, fd, pipe), daemon=True)
                   for fd, pipe in ((1, child.stdout), (2, child.stderr))]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._finish, args=(process, child, readers), daemon=True).start()
        return process

    def _finish(self, process, child, readers):
        code = child.wait()
        for reader in readers:
            reader.join(CLOSED_GRACE)
        self._live.pop(child.pid, None)
        process._finished(rc=code if code >= 0 else 128 - code)

    def wait_ready(self):
        pass

    def push(self, path, to=None):
        if to and os.path.abspath(to) != os.path.abspath(path):
            shutil.copy(path, to)

    def pull(self, path, to):
        shutil.copy(path, to)

    def power_off(self):
        raise Unsupported(f"{self.name} is this machine: it stays on")

    def end(self):
        """The lab's end: what the test left running goes."""
        for process in list(self._live.values()):
            process.kill(9)

    def _not_here(self, *_, **__):
        raise Unsupported(f"{self.name} is this machine, which others use")

    netem = netem_clear = link_down = link_up = rdma_delete = rdma_add = _not_here


def _read(process, fd, pipe):
    with pipe:
        while data := pipe.read(65536):
            process._arrived(fd, data)


def _order(child, op, more):
    try:
        if op == "kill":
            os.killpg(child.pid, more["sig"])
        elif op == "write":
            child.stdin.write(more["data"])
        else:
            child.stdin.close()
    except (ProcessLookupError, BrokenPipeError):
        pass
