"""The command line of scripts/lab."""

import argparse
import os
import select
import shlex
import shutil
import sys
import termios
import threading
import time
import tty

import lab

UNAVAILABLE = 77
TIMED_OUT = 124


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="scripts/lab",
        usage="scripts/lab [options] CMD...  |  --hosts 2 [options] CMD1... -- CMD2...  |  --shell  |  --check",
        description="Runs a command in a guest that has a real RDMA stack; one word is a shell command, several are a "
                    "program and its arguments. With two hosts both commands run at the same time, and each line is "
                    "labelled.")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--no-rdma-modules", action="store_true", help="a kernel without RDMA")
    parser.add_argument("--no-rdma-libs", action="store_true", help="a machine without librdmacm and libibverbs")
    parser.add_argument("--memory", metavar="M", help="of each guest, for example 3G")
    parser.add_argument("--build-dir", default=lab.DEFAULT_BUILD, metavar="DIR",
                        help="where kernel and initramfs are kept (DIR/lab)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S",
                        help="for the commands; they are killed then (status 124)")
    parser.add_argument("--shell", action="store_true", help="an interactive shell on host 1")
    parser.add_argument("--check", action="store_true",
                        help="can a lab run here? Fetches the kernel; status 77 and a reason if not")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    args.commands = [words]
    if args.hosts == 2 and "--" in words:
        cut = words.index("--")
        args.commands = [words[:cut], words[cut + 1:]]
    if args.check or args.shell:
        if words:
            parser.error("--shell and --check take no command")
    elif not all(args.commands) or len(args.commands) != args.hosts:
        parser.error("a command for each host, please" if args.hosts == 2 else "which command?")
    return args


def as_shell(words):
    return words[0] if len(words) == 1 else shlex.join(words)


class Labelled:
    """Whole lines of one host, each behind its name: bytes of two hosts never share a line."""

    lock = threading.Lock()

    def __init__(self, name):
        self._label = name.encode() + b"| "
        self._rest = {1: b"", 2: b""}

    def __call__(self, fd, data):
        *lines, self._rest[fd] = (self._rest[fd] + data).split(b"\n")
        with self.lock:
            for line in lines:
                plain(fd, self._label + line + b"\n")

    def close(self):
        for fd, rest in self._rest.items():
            if rest:
                self(fd, b"\n")


def plain(fd, data):
    stream = sys.stdout.buffer if fd == 1 else sys.stderr.buffer
    stream.write(data)
    stream.flush()


def run(guests, args):
    labels = [Labelled(h.name) for h in guests.hosts] if args.hosts == 2 else []
    processes = [host.start(as_shell(words), cwd=os.getcwd(), on_output=labels[i] if labels else plain)
                 for i, (host, words) in enumerate(zip(guests.hosts, args.commands))]
    limit = time.monotonic() + args.timeout
    statuses = []
    for process in processes:
        try:
            statuses.append(process.wait(max(0, limit - time.monotonic())))
        except lab.LabTimeout:
            process.kill(9)
            print(f"lab: time is up for `{process.cmd}`", file=sys.stderr)
            statuses.append(TIMED_OUT)
    for label in labels:
        label.close()
    return next((s for s in statuses if s), 0)


def shell(host):
    size = shutil.get_terminal_size()
    process = host.start("exec bash -i", cwd=os.getcwd(), pty=(size.lines, size.columns), on_output=plain,
                         env={"TERM": os.environ.get("TERM", "linux")})
    terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(terminal) if terminal is not None else None
    if before:
        tty.setraw(terminal)
    try:
        watched = [sys.stdin]
        while process.rc is None:
            if select.select(watched, [], [], 0.1)[0]:
                data = os.read(sys.stdin.fileno(), 4096)
                process.write(data or b"\x04")  # the terminal's end of file
                watched = watched if data else []
    finally:
        if before:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
    return process.wait()


def main(argv):
    args = parse(argv)
    try:
        if args.check:
            image = lab.Image(args.build_dir).prepare()
            print(f"lab: {image.kernel.name.removeprefix('vmlinuz-')}, {image.accel}")
            return 0
        with lab.Lab(args.hosts, args.build_dir, not args.no_rdma_modules, not args.no_rdma_libs, args.memory,
                     here=False) as guests:
            return shell(guests.hosts[0]) if args.shell else run(guests, args)
    except lab.Unavailable as reason:
        print(f"lab: not here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    except (lab.HostDown, lab.LabTimeout) as fault:
        print(f"lab: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
