#!/usr/bin/env python3
"""Programs that must not notice: the same output and status with and without librsock.so.

    programs.py --library FILE --early FILE --next FILE --process-calls FILE
                --loader-calls FILE --slow-constructor FILE [NAME...]

Each case runs plain (the judge), with the library preloaded, with RSOCK_PATH=tcp, with streams lifted
at once, beside a malloc that calls libc and a library with a definition of its own, and beside
jemalloc and tcmalloc where they are installed.
"""

import argparse
import ctypes.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

PYTHON_SOCKETS = """
import os, select, socket, threading
server = socket.create_server(("127.0.0.1", 0))
def serve():
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(65536):
            peer.sendall(data)
thread = threading.Thread(target=serve)
thread.start()
client = socket.create_connection(server.getsockname())
sent = os.urandom(3_000_000)
threading.Thread(target=lambda: (client.sendall(sent), client.shutdown(socket.SHUT_WR))).start()
poller = select.epoll()
poller.register(client, select.EPOLLIN)
got = b""
while poller.poll(10):
    if not (data := client.recv(1 << 20)):
        break
    got += data
print(got == sent, select.select([client], [], [], 0)[0] == [client])
thread.join()
"""
PYTHON_FORK = """
import os, socket
a, b = socket.socketpair()
t = socket.socket()
t.bind(("127.0.0.1", 0)); t.listen()
pid = os.fork()
if pid == 0:
    c = socket.create_connection(t.getsockname()); c.sendall(b"from the child"); os._exit(0)
p, _ = t.accept()
print(p.recv(100), os.waitpid(pid, 0)[1])
"""
PYTHON_MULTIPROCESSING = """
import multiprocessing
def square(x): return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, pool.map(square, range(5)))
"""
PYTHON_SUBPROCESS = """
import subprocess
print(subprocess.run("echo $$ | tr 0-9 n | tr -s n; exit 3", shell=True, capture_output=True))
print(subprocess.run(["cat"], input=b"x" * 200000, stdout=subprocess.PIPE, close_fds=True).stdout
      == b"x" * 200000)
"""
# As sshd does before it talks to a stranger: no socket of its own, no number left, then a filter. Nothing of ours may be
# said there, nor at the end of such a program.
PYTHON_SANDBOX = """
import ctypes, resource, struct
libc = ctypes.CDLL(None)
allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)))
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
print(libc.prctl(38, 1, 0, 0, 0), libc.prctl(22, 2, program, 0, 0))
"""
PYTHON_NO_NUMBERS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
print("none left")
"""
C_PROGRAM = '#include <stdio.h>\nint main(void) { puts("compiled"); return 5; }\n'


def cases(options, folder):
    (folder / "program.c").write_text(C_PROGRAM)
    (folder / "pool.py").write_text(PYTHON_MULTIPROCESSING)
    python = sys.executable
    shell = shutil.which("bash") or "/bin/sh"
    return {
        "true": ["true"],
        "pipeline": [shell, "-c", "echo one two | cat | wc -w; exit 4"],
        "ls": [shell, "-c", "ls / | wc -l"],
        "shell": [shell, "-c", "x=$(seq 50 | sort -n | tail -1); (exit 2) || echo $x; "
                               "cat <(echo substituted) & wait; exec echo done"],
        "redirect": [shell, "-c", "exec 9>f; echo text >&9; exec 9>&-; cat f; rm f"],
        "gcc": [shell, "-c", "cc program.c -o program && ./program"],
        "cmake": ["cmake", "-E", "echo", "from cmake"],
        "apt": ["apt-get", "--version"],
        "python_sockets": [python, "-c", PYTHON_SOCKETS],
        "python_fork": [python, "-c", PYTHON_FORK],
        "python_subprocess": [python, "-c", PYTHON_SUBPROCESS],
        "python_multiprocessing": [python, "pool.py"],
        "python_sandbox": [python, "-c", PYTHON_SANDBOX],
        "python_no_numbers": [python, "-c", PYTHON_NO_NUMBERS],
        "process_calls": [options.process_calls] + (["no-cancel"] if options.runtime else []),
        "loader_calls": [options.loader_calls, options.slow_constructor],
    }


def ways(options):
    """Preload lists and variables beyond the plain run, by name."""
    # A sanitizer's run-time has to come first.
    library = " ".join(filter(None, [options.runtime, options.library]))
    yield "preloaded", library, {}
    yield "tcp only", library, {"RSOCK_PATH": "tcp"}
    yield "with a summary", library, {"RSOCK_SUMMARY": "summary.json"}
    yield "lifted at once", library, {"RSOCK_LIFT_BYTES": "1", "RSOCK_LIFT_CALLS": "1"}
    if options.runtime:
        return  # it brings a malloc of its own
    yield "early calls, in front", f"{options.early} {library}", {}
    yield "early calls, behind", f"{library} {options.early}", {}
    yield "next definition", f"{library} {options.next}", {}
    for name in ("jemalloc", "tcmalloc", "tcmalloc_minimal"):
        soname = ctypes.util.find_library(name)
        if soname:
            yield name, f"{soname} {library}", {}
            yield f"{name}, behind", f"{library} {soname}", {}


def run(command, folder, preload, variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RSOCK_", "LD_"))}
    environment.update(variables, LC_ALL="C", RSOCK_CONFIG="/dev/null", RSOCK_LOG="warn",
                       ASAN_OPTIONS="detect_leaks=0")
    if preload:
        environment["LD_PRELOAD"] = preload
    try:
        # A file: into a pipe the library writes only where it can open it anew, for it must never wait.
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=errors, timeout=120)
            errors.seek(0)
            return done.returncode, done.stdout, errors.read()
    except subprocess.TimeoutExpired as late:
        return "no end after 120 s", late.stdout, b""


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--library", required=True)
    arguments.add_argument("--early", required=True)
    arguments.add_argument("--next", required=True)
    arguments.add_argument("--process-calls", required=True)
    arguments.add_argument("--loader-calls", required=True)
    arguments.add_argument("--slow-constructor", required=True)
    arguments.add_argument("--runtime", default="", help="what has to be preloaded in front")
    arguments.add_argument("names", nargs="*")
    options = arguments.parse_args()
    faults = runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        known = cases(options, folder)
        for case in options.names or known:
            command = known[case]
            if not shutil.which(command[0]):
                print(f"{case}: skipped, no {command[0]}")
                continue
            judge = run(command, folder, "", {})
            for way, preload, variables in ways(options):
                if case in ("python_sandbox", "python_no_numbers") and options.early in preload:
                    continue  # its calls at the end need numbers
                runs += 1
                got = run(command, folder, preload, variables)
                if got != judge:
                    faults += 1
                    print(f"{case}, {way}: differs\n  plain: {judge}\n  here:  {got}")
    print(f"{runs} runs, {faults} differ")
    return 1 if faults or runs == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
