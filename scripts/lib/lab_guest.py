"""A lab's host that is a guest of qemu. Ended by killing that process, by its pid: there is nothing to save in it."""

import base64
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import threading
import time
import uuid

from lab_image import QEMU
from lab_process import HostCalls, HostDown, LabTimeout, Process

BOOT_SECONDS = 120


class Guest(HostCalls):
    """number: 1 or 2. wire: this host's end of the cable between two guests, or None for a veth pair.

    The constructor starts qemu; wait_ready ends the boot. One thread reads what the agent tells.
    """

    def __init__(self, number, image, folder, shared, *, memory, cpus, rdma_modules, rdma_libs, wire=None):
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"
        # In one guest, the far end of the veth pair: inside network namespace `peer`, where rxe cannot be.
        self.peer_address = None if wire else "10.77.0.2"
        self.device = "eth0" if wire else "veth0"
        self.rdma_device = "rxe0" if rdma_modules else None
        self.folder = pathlib.Path(folder)
        self._shared = str(shared)
        self.results = str(self.folder / "results")
        self._console = self.folder / "console.log"
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._commands = {}
        self._count = 0
        self._ready = threading.Event()
        self._fault = None
        os.makedirs(self.results)
        ours, theirs = socket.socketpair()
        self._port = ours
        argv = self._command_line(image, memory, cpus, rdma_modules, theirs.fileno(), wire)
        passed = [theirs.fileno()] + ([wire.fileno()] if wire else [])
        with open(self.folder / "qemu.log", "wb") as log:
            # Its own session: ^C is ours to handle.
            self._qemu = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=passed,
                                          start_new_session=True)
        theirs.close()
        self._tell(op="setup", number=number, device=self.device, results=self.results, shared=self._shared,
                   modules=str(image.modules), rdma_modules=rdma_modules, rdma_libs=rdma_libs)
        self._thread = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._thread.start()

    def _command_line(self, image, memory, cpus, rdma, port, wire):
        accel = "kvm" if image.accel == "kvm" else "tcg,thread=multi"
        share = "local,security_model=none,multidevs=remap"
        # tsc=reliable: the emulated counters are the machine's own, in step; without it a guest falls back to a clock
        # whose every reading leaves the emulated processor, and perftest has no cycles to count.
        # no_timer_check: on a machine that is busy the kernel's look whether its timer ticks sees none, and panics.
        # norandmaps: translated code is found again by its virtual address, so what moves with each exec is translated
        # each time (a start of /bin/true takes three times as long).
        boot = "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on tsc=reliable no_timer_check norandmaps"
        # Where an emulated processor says that it moves strings fast, the kernel copies by it, byte by byte: two to four
        # times slower, TCP and rxe too. Five levels of pages are one more to walk.
        cpu = "max" if image.accel == "kvm" else "max,-erms,-fsrm,-la57"
        argv = [QEMU, "-M", "q35", "-accel", accel, "-cpu", cpu, "-smp", cpus, "-m", memory,
                "-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{_escaped(self._console)}",
                "-kernel", image.kernel, "-initrd", image.initramfs,
                "-append", f"{boot} lab.rdma={'yes' if rdma else 'no'}",
                "-fsdev", f"{share},id=root,path=/,readonly=on", "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
                "-fsdev", f"{share},id=results,path={_escaped(self.results)}",
                "-device", "virtio-9p-pci,fsdev=results,mount_tag=results",
                "-fsdev", f"{share},id=shared,path={_escaped(self._shared)}",
                "-device", "virtio-9p-pci,fsdev=shared,mount_tag=shared",
                "-device", "virtio-serial-pci", "-chardev", f"socket,id=agent,fd={port}",
                "-device", "virtserialport,chardev=agent,name=lab"]
        if wire:
            mac = f"52:54:00:4c:ab:{int(self.name[-1]):02x}"
            argv += ["-netdev", f"socket,id=wire,fd={wire.fileno()}",
                     "-device", f"virtio-net-pci,netdev=wire,mac={mac},host_mtu=9000,romfile="]
        return list(map(str, argv))

    def wait_ready(self):
        limit = time.monotonic() + BOOT_SECONDS
        while not self._ready.wait(0.2):
            if self._qemu.poll() is not None or time.monotonic() > limit:
                logs = [log for log in (self.folder / "qemu.log", self._console) if log.exists()]
                words = "".join(log.read_text(errors="replace")[-1500:] for log in logs)
                if self._qemu.poll() is None:
                    raise LabTimeout(f"{self.name} has not booted after {BOOT_SECONDS} s: {words}")
                raise HostDown(f"{self.name} does not boot: {words}")
        if self._fault:
            raise HostDown(f"{self.name} cannot be set up: {self._fault}")

    # --- commands ----------------------------------------------------------------------------------------------------

    def start(self, cmd, env=None, cwd=None, memlock=None, user=None, stdin=False, pty=None, on_output=None):
        """A shell command. memlock: bytes (default: no limit). user: a uid. pty: (rows, columns)."""
        with self._lock:
            if self._qemu.poll() is not None:
                raise HostDown(f"{self.name} is off")
            self._count += 1
            number = self._count
            process = self._commands[number] = Process(cmd, lambda op, **more: self._order(op, number, more), on_output)
        self._tell(op="start", id=number, cmd=cmd, env=env, cwd=cwd, memlock=memlock, user=user, stdin=stdin, pty=pty)
        process.wait_for(lambda: process.pid or process.rc is not None, 60, "the agent is silent; not started")
        return process

    def _order(self, op, number, more):
        if "data" in more:
            more["data"] = base64.b64encode(more["data"]).decode()
        self._tell(op=op, id=number, **more)

    def _tell(self, **order):
        with self._write_lock:
            try:
                self._port.sendall(json.dumps(order).encode() + b"\n")
            except OSError:
                raise HostDown(f"{self.name} is off") from None

    def _read(self):
        with self._port.makefile("rb") as lines:
            try:
                for line in lines:
                    self._hear(json.loads(line))
            except (OSError, ValueError):  # killed in the middle of a line
                pass
        with self._lock:
            for process in self._commands.values():
                process._finished(down=f"{self.name} went off")

    def _hear(self, message):
        if "id" not in message:
            self._fault = message.get("fault")
            self._ready.set()
            return
        process = self._commands[message["id"]]
        if "pid" in message:
            process._started(message["pid"])
        elif "rc" in message:
            process._finished(rc=message["rc"])
        else:
            process._arrived(message["fd"], base64.b64decode(message["data"]))

    def push(self, path, to=None):
        """Copies a file to `to` in the guest (default: the same name, over what the machine's own / shows there)."""
        to = to or os.path.abspath(path)
        carried = os.path.join(self.results, f".push-{uuid.uuid4().hex}")
        shutil.copy(path, carried)
        self.check(f"mkdir -p {shlex.quote(os.path.dirname(to))} && cp -p {carried} {shlex.quote(to)}")
        os.unlink(carried)

    def pull(self, path, to):
        """Copies a file of the guest to `to` on the machine."""
        carried = os.path.join(self.results, f".pull-{uuid.uuid4().hex}")
        self.check(f"cp {shlex.quote(path)} {carried}")
        shutil.move(carried, to)

    # --- failures ----------------------------------------------------------------------------------------------------

    def netem(self, spec):
        """What leaves the device from now on: `delay 20ms`, `loss 5%`, `loss 100%` is a partition."""
        self.check(f"tc qdisc replace dev {self.device} root netem {spec}")

    def netem_clear(self):
        self.run(f"tc qdisc del dev {self.device} root")

    def link_down(self):
        self.check(f"ip link set {self.device} down")

    def link_up(self):
        self.check(f"ip link set {self.device} up")

    def rdma_delete(self, timeout=60):
        """The device is taken away: newcomers find none from now on. Returns the command that does it, to wait for: it
        ends when the last process has closed the device. Until then rxe works on under open queue pairs, and their
        processes only hear RDMA_CM_EVENT_DEVICE_REMOVAL (the kernel waits: rxe cannot take a context from a process).
        """
        removal = self.start("rdma link delete rxe0")
        limit = time.monotonic() + timeout
        while removal.rc is None and "rxe0/" in self.check("rdma link", timeout):
            if time.monotonic() > limit:
                raise LabTimeout(f"{self.name}: rxe0 is still listed {timeout} s after its removal began")
        if removal.rc:
            raise RuntimeError(f"{self.name}: rxe0 cannot be removed: {removal.errors()}")
        return removal

    def rdma_add(self):
        self.check(f"rdma link add rxe0 type rxe netdev {self.device}")

    def power_off(self):
        """The plug is pulled: nothing is flushed, no FIN leaves."""
        if self._qemu.poll() is None:
            self._qemu.kill()
        self._qemu.wait()
        self._thread.join(10)
        self._port.close()

    end = power_off


def _escaped(path):
    return str(path).replace(",", ",,")
