"""A lab: one or two hosts with a real RDMA stack (kernel, rdma-core, RoCEv2 in software), for tests and by hand.

    with Lab(hosts=2, build_dir="build") as lab:
        server = lab.hosts[0].start("rping -s -C 10 -a 10.77.0.1")
        client = lab.hosts[1].run("rping -c -C 10 -a 10.77.0.1")

The hosts are guests of qemu that see this machine's files read-only, under a tmpfs: programs and the build folder are
there, and what a test breaks is gone with the guest. A boot takes some ten seconds, a command milliseconds: run
many in one lab.

`here`: True: the hosts are this machine itself (lab_local); False: guests, always; None: this machine if it has an RDMA
device with an address and the lab is not to lack anything, else guests. RSOCK_LAB=here|guest decides for None.
`lab.here` says what came out. A test that needs failures asks for guests.

1. Nothing is left behind: qemu is killed by its pid, its folder removed, at the block's end, also by ^C or SIGTERM.
2. Labs don't see each other: hosts are wired by socket pairs, which have no names.
3. Whatever prevents a lab is raised as Unavailable before anything starts.
"""

import os
import pathlib
import shutil
import signal
import socket
import tempfile
import threading

from lab_guest import Guest
from lab_image import Image, Unavailable
from lab_local import LocalHost, rdma_address
from lab_process import HostDown, LabTimeout, Result, Unsupported

__all__ = ["Lab", "Result", "Unavailable", "LabTimeout", "HostDown", "Unsupported"]

DEFAULT_BUILD = pathlib.Path(__file__).resolve().parents[2] / "build"


def _raise_interrupt(*_):
    raise KeyboardInterrupt


def _decide(here, whole):
    asked = os.environ.get("RSOCK_LAB", "")
    if here is None and asked in ("here", "guest"):
        here = asked == "here"
    if here and not whole:
        raise Unavailable("this machine's modules and libraries stay where they are")
    return (whole and rdma_address() is not None) if here is None else here


class Lab:
    def __init__(self, hosts=1, build_dir=None, rdma_modules=True, rdma_libs=True, memory=None, cpus=None,
                 here=None):
        if hosts not in (1, 2):
            raise ValueError("a lab has one host or two")
        self._options = dict(memory=memory or {1: "2G", 2: "1536M"}[hosts], cpus=cpus or {1: 2, 2: 1}[hosts],
                             rdma_modules=rdma_modules, rdma_libs=rdma_libs)
        self._count = hosts
        self.here = _decide(here, rdma_modules and rdma_libs)
        self._build_dir = build_dir or DEFAULT_BUILD
        self._folder = None
        self._old_handler = None
        self.hosts = []
        self.shared = None  # a folder that all hosts and this machine see at once, under this name

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            # SIGTERM ends us as ^C does: through the `with` block's exit.
            self._old_handler = signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            self._make_hosts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_hosts(self):
        image = None if self.here else Image(self._build_dir).prepare()
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="rsock-lab-"))
        self._folder.chmod(0o755)
        folders = [self._folder / f"host{n}" for n in range(1, self._count + 1)]
        self.shared = self._folder / "shared"
        for folder in (*folders, self.shared):
            folder.mkdir()
        if self.here:
            where = rdma_address() or (None, "lo", "127.0.0.1", "::1")
            self.hosts = [LocalHost(n, folder, where) for n, folder in enumerate(folders, 1)]
            return
        # One datagram a frame. A guest that dies takes nothing from the other: its frames vanish.
        wires = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) if self._count == 2 else (None,)
        for number, (folder, wire) in enumerate(zip(folders, wires), 1):
            self.hosts.append(Guest(number, image, folder, self.shared, wire=wire, **self._options))
        for wire in filter(None, wires):
            wire.close()
        for host in self.hosts:
            host.wait_ready()

    def __exit__(self, *_):
        # A second ^C while we clean up must not leave half of it.
        main = threading.current_thread() is threading.main_thread()
        old = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}
        try:
            for host in self.hosts:
                host.end()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            if main:
                signal.signal(signal.SIGINT, old[signal.SIGINT])
                signal.signal(signal.SIGTERM, self._old_handler)
