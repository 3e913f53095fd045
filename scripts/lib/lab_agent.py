"""Runs inside a guest: starts commands for the lab, and tells what they print and how they end.

JSON lines over a virtio-serial port. Bytes of programs travel as base64.

    lab    {"op": "setup", ...}                           once, first
           {"op": "start", "id", "cmd", "env", "cwd", "memlock", "user", "stdin", "pty"}
           {"op": "kill", "id", "sig"}  {"op": "write", "id", "data"}  {"op": "close", "id"}
    guest  {"ready": true}  {"fault": text}
           {"id", "pid"}  {"id", "fd", "data"}  {"id", "rc"}

A command's rc follows everything that it had printed when it ended; what its children print later still comes.
One thread, nothing that waits but the selector. End of the port is the end of the guest.
"""

import base64
import fcntl
import glob
import json
import os
import pty
import resource
import selectors
import signal
import socket
import struct
import subprocess
import termios
import time

PORT = "/dev/vport{}p1"
LIBRARY_FOLDERS = [f"{p}/{d}" for p in ("/usr", "/usr/local") for d in ("lib", "lib64", "lib/*-linux-gnu")]
AT_ONCE = "trans=virtio,version=9p2000.L,msize=262144,cache=none"
RDMA_LIBRARIES = ("librdmacm.so", "libibverbs.so")


def sh(script):
    tell(["/bin/sh", "-e"], script)


def ip(lines, *options):
    tell(["ip", *options, "-batch", "-"], "\n".join(lines) + "\n")


def tell(argv, text):
    done = subprocess.run(argv, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stdout.decode(errors='replace')}")


def write_file(path, text):
    with open(path, "w") as out:
        out.write(text)


# --- the machine -----------------------------------------------------------------------------------------------------


def setup(order):
    number = order["number"]
    socket.sethostname(f"host{number}")
    version = os.uname().release
    os.makedirs(f"/lib/modules/{version}", exist_ok=True)
    os.makedirs(order["results"], exist_ok=True)
    os.makedirs(order["shared"], exist_ok=True)
    # No cache on the shared folders: all sides see at once what another has written.
    sh(f"""mount --bind '{order["modules"]}' /lib/modules/{version}
           mount -t 9p -o {AT_ONCE} results '{order["results"]}'
           mount -t 9p -o {AT_ONCE} shared '{order["shared"]}'""")
    with open("/etc/hosts", "a") as hosts:
        hosts.write("".join(f"10.77.0.{n} host{n}\nfd77::{n} host{n}\n" for n in (1, 2)))
    if not order["rdma_modules"]:
        # The kernel loads ib_core by itself when a program opens an RDMA netlink or SMC socket.
        os.makedirs("/etc/modprobe.d", exist_ok=True)
        write_file("/etc/modprobe.d/lab.conf", "install ib_core /bin/false\n")
    if not order["rdma_libs"]:
        for folder in LIBRARY_FOLDERS:
            for name in RDMA_LIBRARIES:
                for path in glob.glob(f"{folder}/{name}*"):
                    os.unlink(path)
    # libibverbs loads every vendor's library to look for its devices; these processors take a while for it.
    for path in glob.glob("/etc/libibverbs.d/*.driver"):
        if os.path.basename(path) != "rxe.driver":
            os.unlink(path)
    network(order)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def network(order):
    device, number = order["device"], order["number"]
    lines = ["link set lo up"]
    if device == "veth0":
        lines += ["netns add peer", "link add veth0 mtu 9000 type veth peer name veth1 mtu 9000 netns peer"]
    # Addresses that are valid at once, and stay when a test takes the link down.
    for knob, value in (("accept_dad", 0), ("keep_addr_on_down", 1), ("router_solicitations", 0)):
        for scope in ("all", "default"):
            write_file(f"/proc/sys/net/ipv6/conf/{scope}/{knob}", str(value))
    lines += [f"link set {device} mtu 9000 up", f"addr add 10.77.0.{number}/24 dev {device}",
              f"addr add fd77::{number}/64 dev {device} nodad"]
    ip(lines)
    if device == "veth0":
        ip(["link set lo up", "link set veth1 up", "addr add 10.77.0.2/24 dev veth1",
            "addr add fd77::2/64 dev veth1 nodad"], "-n", "peer")
    if order["rdma_modules"]:
        sh(f"rdma link add rxe0 type rxe netdev {device}")


# --- commands --------------------------------------------------------------------------------------------------------


class Port:
    """The lab's end of the line. Writes wait: the lab always reads."""

    def __init__(self):
        path = glob.glob(PORT.format("*"))[0]
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rest = b""

    def send(self, **message):
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.fd, data):]

    def receive(self):
        """The orders that are complete; None at the end."""
        chunk = os.read(self.fd, 65536)
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines]


class Command:
    def __init__(self, order, port, selector):
        self.id, self._port, self._selector = order["id"], port, selector
        self._in = None
        self._unwritten, self._closing = b"", False
        env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TERM")} | (order.get("env") or {})
        memlock = order.get("memlock")

        def limits():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the agent ignores it, and that is inherited
            if memlock is not None:
                resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

        options = dict(env=env, cwd=order.get("cwd") or "/", start_new_session=True, preexec_fn=limits)
        if order.get("user") is not None:
            options.update(user=order["user"], group=order["user"], extra_groups=[])
        argv = ["/bin/bash", "-c", order["cmd"]]
        if order.get("pty"):
            self._start_on_terminal(argv, options, order["pty"])
        else:
            self._start_on_pipes(argv, options, order.get("stdin"))
        port.send(id=self.id, pid=self._process.pid)
        self._pidfd = os.pidfd_open(self._process.pid)
        selector.register(self._pidfd, selectors.EVENT_READ, self._ended)

    def _start_on_pipes(self, argv, options, with_stdin):
        stdin = subprocess.PIPE if with_stdin else subprocess.DEVNULL
        self._process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                                         **options)
        self._in = self._process.stdin
        pipes = {1: self._process.stdout, 2: self._process.stderr}
        self._outputs = {pipe.fileno(): (fd, pipe) for fd, pipe in pipes.items()}
        self._watch()

    def _start_on_terminal(self, argv, options, size):
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        inner = options["preexec_fn"]

        def with_terminal():
            inner()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        options["preexec_fn"] = with_terminal
        self._process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, **options)
        os.close(slave)
        self._in = os.fdopen(os.dup(master), "wb", 0)
        self._outputs = {master: (1, os.fdopen(master, "rb", 0))}
        self._watch()

    def _watch(self):
        if self._in:
            os.set_blocking(self._in.fileno(), False)
        for fd in self._outputs:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(fd))

    def _read(self, fd):
        """True when something came."""
        try:
            data = os.read(fd, 32768)
        except BlockingIOError:
            return False
        except OSError:  # a terminal whose last user is gone
            data = b""
        if not data:
            self._selector.unregister(fd)
            self._outputs.pop(fd)[1].close()
            return False
        self._port.send(id=self.id, fd=self._outputs[fd][0], data=base64.b64encode(data).decode())
        return True

    def _ended(self):
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        code = self._process.wait()
        for fd in list(self._outputs):
            while fd in self._outputs and self._read(fd):
                pass
        # As a shell says it.
        self._port.send(id=self.id, rc=code if code >= 0 else 128 - code)

    def kill(self, sig):
        try:
            os.killpg(self._process.pid, sig)
        except ProcessLookupError:
            pass

    def write(self, data):
        """What the program does not take at once waits here: the agent must not."""
        if self._in and not self._unwritten:
            self._selector.register(self._in, selectors.EVENT_WRITE, self._write)
        self._unwritten += data if self._in else b""

    def close(self):
        self._closing = True
        if self._in and not self._unwritten:
            self._in.close()
            self._in = None

    def _write(self):
        try:
            self._unwritten = self._unwritten[self._in.write(self._unwritten) or 0:]
        except OSError:  # nobody reads it any more
            self._unwritten = b""
        if not self._unwritten:
            self._selector.unregister(self._in)
            if self._closing:
                self.close()


def serve(port):
    selector = selectors.DefaultSelector()
    commands = {}

    def order_came():
        orders = port.receive()
        if orders is None:
            return False
        for order in orders:
            if order["op"] == "start":
                try:
                    commands[order["id"]] = Command(order, port, selector)
                except OSError as error:
                    port.send(id=order["id"], fd=2, data=base64.b64encode(f"lab: {error}\n".encode()).decode())
                    port.send(id=order["id"], rc=127)
            elif order["id"] in commands:
                command = commands[order["id"]]
                if order["op"] == "kill":
                    command.kill(order["sig"])
                elif order["op"] == "write":
                    command.write(base64.b64decode(order["data"]))
                elif order["op"] == "close":
                    command.close()
        return True

    selector.register(port.fd, selectors.EVENT_READ, order_came)
    while True:
        for key, _ in selector.select():
            # A callback before this one may have closed the number, and another opened it again.
            if selector.get_map().get(key.fd) is key and key.data() is False and key.data is order_came:
                return


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    port = Port()
    limit = time.monotonic() + 10
    orders = []
    while not orders:
        orders = port.receive()
        if orders is None and time.monotonic() < limit:  # qemu's end is not announced yet
            time.sleep(0.02)
        elif orders is None:
            return
    try:
        setup(orders[0])
    except (OSError, RuntimeError) as error:
        port.send(fault=str(error))
        return
    port.send(ready=True)
    serve(port)


if __name__ == "__main__":
    main()
