"""Servers of others (redis, nginx, PostgreSQL) for a measurement: started on free ports in folders of their own, ended, and
what they cost.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time

import runner
from service_programs import NGINX

TICKS = os.sysconf("SC_CLK_TCK")
_libc = ctypes.CDLL(None)


def _stat(pid):
    """(parent, seconds of its children that are gone) from proc(5), or None."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[1]), (int(words[13]) + int(words[14])) / TICKS


def _own_seconds(pid):
    """All its threads, also those that have ended. proc(5) tells it in ticks, of which a short run takes few."""
    clock = ctypes.c_int()
    if _libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0  # it has ended
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return 0


def cpu_seconds(root):
    """Of a process and all that came from it."""
    stats = {int(entry): _stat(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    stats = {pid: stat for pid, stat in stats.items() if stat}
    total, family = 0, [root]
    for pid in family:
        if pid in stats:
            total += _own_seconds(pid) + stats[pid][1]
        family += [child for child, stat in stats.items() if stat[0] == pid]
    return total


@contextlib.contextmanager
def served(run, variant, argv, port, folder=None, library=None, how=signal.SIGTERM):
    folder = folder or tempfile.mkdtemp(dir=run.folder)
    summaries = os.path.join(folder, f"summary-{time.monotonic_ns()}")
    environment = runner.environment(variant, summaries)
    if library and "LD_PRELOAD" in environment:
        environment["LD_PRELOAD"] = library
    server = run.start(argv, environment, "server")
    try:
        run.wait_for_port(server, port)
        yield server, port, environment, summaries
    finally:
        server.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=10)
        run.stop(server)


NGINX_CONFIG = """
daemon off;
pid {folder}/nginx.pid;
worker_processes 1;
env LD_PRELOAD; env RSOCK_PATH; env RSOCK_SUMMARY; env RSOCK_SPIN_US;
{user}
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000000;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen {address}:{port}; root {files}; }}
}}
"""


def in_url(address):
    return f"[{address}]" if ":" in address else address


def start_nginx(run, variant, size):
    """It serves /SIZE, a file of so many bytes."""
    port, folder = run.free_port(), tempfile.mkdtemp(dir=run.folder)
    run.file(size)
    with open(os.path.join(folder, "nginx.conf"), "w", encoding="utf-8") as file:
        file.write(NGINX_CONFIG.format(folder=folder, files=run.files, address=in_url(run.address), port=port,
                                       user="user root;" if os.geteuid() == 0 else ""))
    return served(run, variant, [NGINX, "-e", os.path.join(folder, "error.log"), "-c", os.path.join(folder, "nginx.conf")],
                   port, folder)
