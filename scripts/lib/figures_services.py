"""The figures of services: what a server and its clients, unmodified, gain on shared memory, and what the server pays.

The servers are Debian's (redis, nginx, PostgreSQL), started here on free ports in folders of their own.
"""

import contextlib
import csv
import glob
import io
import os
import re
import shutil
import signal
import subprocess
import time

import runner
import summary
import workloads
from figures import Figure, ratio
from servers import cpu_seconds, served, start_nginx
from service_programs import AS_POSTGRES, INITDB, POSTGRES, make_postgres_folder

CLIENTS = (1, 10, 50, 200)


class Service(workloads.Workload):
    """One run of a client program against a server. start(run, variant): a context manager that gives (process, port,
    the server's environment, the file of summaries); client(port): its command line; rates(output): figures per second,
    of which the first counts the requests that the server's CPU time is divided by."""

    def __init__(self, key, title, seconds, start, client, rates):
        super().__init__(key, title, seconds)
        self.start, self.client, self.rates = start, client, rates

    def run(self, run, variant):
        with self.start(run, variant) as (server, port, environment, summaries):
            before, began = cpu_seconds(server.pid), time.monotonic()
            client = run.start(self.client(port), environment, "client")
            out = run.finish(client, self.seconds + 60, "client")
            elapsed = time.monotonic() - began
            time.sleep(0.1)  # backends end behind their clients
            used = cpu_seconds(server.pid) - before
        figures = self.rates(out)
        figures["server_cpu_us_per_request"] = 1e6 * used / (next(iter(figures.values())) * elapsed)
        if not variant.lifts_to:
            return figures, None
        text = runner.read(summaries)
        roles = {f"{entry['exe']} {pid}": pid for pid, entry in summary.parse(text).items()
                 if entry.get("streams") and (entry.get("lifted") or {}).get(variant.lifts_to)}
        proof = summary.prove(text, roles, variant.lifts_to)
        if len(roles) < 2:
            proof.faults.append("not both ends were lifted")
        return figures, proof


# ---- redis ------------------------------------------------------------------------------------------------

def _start_redis(run, variant):
    port = run.free_port()
    return served(run, variant, ["redis-server", "--port", str(port), "--bind", run.address, "--save", "",
                                 "--appendonly", "no", "--dir", run.folder], port)


def _redis_rates(out):
    rows = {row["test"]: float(row["rps"]) for row in csv.DictReader(io.StringIO(out))}
    if set(rows) != {"GET", "SET"}:
        raise runner.RunError("redis-benchmark gave " + runner.tail(out))
    # Both have the same number of requests, one after the other.
    both = 2 / (1 / rows["GET"] + 1 / rows["SET"])
    return {"requests_per_s": both, "get_per_s": rows["GET"], "set_per_s": rows["SET"]}


def redis(clients, seconds):
    count = int((40_000 if clients == 1 else 150_000) * seconds / 2)
    return Service(f"redis_{clients}", f"redis-benchmark, {clients} clients", seconds, _start_redis,
                   lambda port: ["redis-benchmark", "-p", str(port), "-c", str(clients), "-n", str(count), "-t", "get,set",
                                 "--csv"], _redis_rates)


# ---- nginx ------------------------------------------------------------------------------------------------

def _wrk_rates(out):
    found = re.search(r"Requests/sec:\s+([0-9.]+)", out)
    if not found or "Socket errors" in out or "Non-2xx" in out:
        raise runner.RunError("wrk: " + runner.tail(out))
    return {"requests_per_s": float(found[1])}


def nginx(name, size, label, clients, seconds):
    return Service(f"nginx_{name}_{clients}", f"nginx, wrk, {label}, {clients} clients", seconds,
                   lambda run, variant: start_nginx(run, variant, size),
                   lambda port: ["wrk", "-t", "1", "-c", str(clients), "-d", f"{max(1, round(seconds))}s",
                                 f"http://127.0.0.1:{port}/{size}"], _wrk_rates)


# ---- PostgreSQL ---------------------------------------------------------------------------------------------

_clusters = {}  # of a Runner: made once, used by every run


def _cluster(run):
    """A folder that the server's user may read, with a cluster of pgbench's tables, scale 10."""
    if run in _clusters:
        return _clusters[run]
    os.chmod(run.folder, 0o755)
    folder = os.path.join(run.folder, "postgres")
    make_postgres_folder(folder)

    def plainly(*argv, as_user=AS_POSTGRES):
        done = subprocess.run([*as_user, *argv], capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode != 0:
            raise runner.RunError(f"{argv[0]}: {runner.tail(done.stderr)}")

    data = os.path.join(folder, "data")
    plainly(*INITDB, data, as_user=())  # it has its own
    with open(os.path.join(data, "postgresql.conf"), "a", encoding="utf-8") as config:
        config.write(f"\nlisten_addresses = '{run.address}'\nunix_socket_directories = ''\nmax_connections = 250\n"
                     "shared_buffers = 256MB\nfsync = off\nautovacuum = off\n")
    port = run.free_port()
    plainly(f"{POSTGRES}/pg_ctl", "-D", data, "-o", f"-p {port}", "-w", "-l", os.path.join(folder, "log"), "start")
    try:
        plainly(f"{POSTGRES}/pgbench", "-h", run.address, "-p", str(port), "-U", "postgres", "-i", "-s", "10", "-q", "postgres")
    finally:
        plainly(f"{POSTGRES}/pg_ctl", "-D", data, "-m", "fast", "-w", "stop")
    _clusters[run] = folder
    return folder


@contextlib.contextmanager
def _start_postgres(run, variant):
    folder, port, library = _cluster(run), run.free_port(), None
    if "LD_PRELOAD" in variant.env:
        library = os.path.join(folder, "librsock.so")
        shutil.copy(variant.env["LD_PRELOAD"], library)
    argv = [*AS_POSTGRES, f"{POSTGRES}/postgres", "-D", os.path.join(folder, "data"), "-p", str(port)]
    # SIGINT: "fast" shutdown, as pg_ctl does.
    with served(run, variant, argv, port, folder, library, signal.SIGINT) as started:
        pidfile = os.path.join(folder, "data", "postmaster.pid")
        limit = time.monotonic() + 20
        while time.monotonic() < limit and runner.read(pidfile).split()[-1:] != ["ready"]:
            time.sleep(0.01)
        yield started


def _pgbench_rates(out):
    found = re.search(r"tps = ([0-9.]+)", out)
    if not found:
        raise runner.RunError("pgbench: " + runner.tail(out))
    return {"requests_per_s": float(found[1])}


def pgbench(clients, seconds):
    return Service(f"pgbench_{clients}", f"pgbench -S, {clients} clients", seconds, _start_postgres,
                   lambda port: [f"{POSTGRES}/pgbench", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "-n", "-S", "-c",
                                 str(clients), "-j", "1", "-T", str(max(1, round(seconds))), "postgres"], _pgbench_rates)


# ---- who does nothing -------------------------------------------------------------------------------------------

IDLER = """
import socket, sys, time
streams = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(50)]
for _ in range(300):
    for stream in streams:
        stream.sendall(b"PING\\r\\n")
        assert stream.recv(100) == b"+PONG\\r\\n"
print("ready", flush=True)
sys.stdin.read(1)
"""


class Idle(workloads.Workload):
    """redis and 50 lifted connections that are silent: CPU time of both processes, their switches of threads."""

    def run(self, run, variant):
        with _start_redis(run, variant) as (server, port, environment, summaries):
            client = run.start(["/usr/bin/python3", "-c", IDLER, str(port)], environment, "client", stdin=subprocess.PIPE)
            limit = time.monotonic() + 30
            while "ready" not in runner.read(client.base + ".stdout") and time.monotonic() < limit:
                time.sleep(0.05)
            time.sleep(1)  # what has just ended is over
            before, switches = [cpu_seconds(p.pid) for p in (server, client)], self._switches(server, client)
            time.sleep(self.seconds)
            used = [cpu_seconds(p.pid) - b for p, b in zip((server, client), before)]
            switches = self._switches(server, client) - switches
            client.stdin.close()
            run.finish(client, 10, "client")
        proof = None
        if variant.lifts_to:
            proof = summary.prove(runner.read(summaries), {"server": server.pid, "client": client.pid}, variant.lifts_to)
        return {"cpu_ms_per_s": 1e3 * sum(used) / self.seconds, "switches_per_s": switches / self.seconds}, proof

    @staticmethod
    def _switches(*processes):
        total = 0
        for process in processes:
            for status in glob.glob(f"/proc/{process.pid}/task/*/status"):
                total += sum(map(int, re.findall(r"voluntary_ctxt_switches:\s+(\d+)", runner.read(status))))
        return total


class IdleMemory(workloads.Workload):
    """KiB a connection and end: what 2,000 connections that said little take beyond what 100 take (proportional set
    size)."""

    def __init__(self, key, title, bench):
        super().__init__(key, title, 6)
        self.program = os.path.join(bench, "many")

    def run(self, run, variant):
        few, many = (self._pss(run, variant, count) for count in (100, 2000))
        return {"kib_per_connection": (many - few) / 1900 / 2}, None

    def _pss(self, run, variant, count):
        port = run.free_port()
        environment = runner.environment(variant, os.path.join(run.folder, "idle-summary"))
        server = run.start([self.program, "server", "--port", str(port), "--bind", run.address], environment, "server")
        try:
            run.wait_for_port(server, port)
            client = run.start([self.program, "client", "--port", str(port), "--host", run.address, "--connections",
                                str(count), "--hot", "1", "--rounds", "5", "--settle", "1", "--seconds", "3"],
                               environment, "client")
            limit = time.monotonic() + 30
            while "steady" not in runner.read(client.base + ".stderr") and time.monotonic() < limit:
                time.sleep(0.02)
            total = sum(int(re.search(r"^Pss:\s+(\d+)", runner.read(f"/proc/{p.pid}/smaps_rollup"), re.M)[1])
                        for p in (server, client))
            run.finish(client, 20, "client")
        finally:
            run.stop(server)
        return total


# ---- the list -------------------------------------------------------------------------------------------------

def make(options):
    library = os.path.abspath(os.path.join(options.build_dir, "librsock.so"))
    plain = runner.Variant.plain("plain")
    shm = runner.Variant.shim(library, "shm")
    seconds = 1 if options.quick else 2
    result = []

    def add(key, title, load, target):
        needs = [(load, plain), (load, shm)]
        result.append(Figure(f"service_{key}", f"{title}, against TCP", target, "x", needs, ratio("requests_per_s")))
        result.append(Figure(f"service_cpu_{key}", f"{title}: server CPU a request, TCP's against ours", 1, "x", needs,
                             ratio("server_cpu_us_per_request", "lower")))

    for n in CLIENTS:
        add(f"redis_{n}", f"redis-benchmark GET and SET, {n} clients", redis(n, seconds), 1.5 if n == 50 else 1)
    for n in CLIENTS:
        add(f"pgbench_{n}", f"pgbench -S, {n} clients", pgbench(n, seconds), 1.2 if n == 10 else 1)
    for n in CLIENTS:
        add(f"nginx_1k_{n}", f"nginx, wrk, 1 KiB keep-alive, {n} clients", nginx("1k", 1 << 10, "1 KiB", n, seconds),
            1.3 if n == 50 else 1)
    for n in CLIENTS:
        add(f"nginx_1m_{n}", f"nginx, wrk, 1 MiB, {n} clients", nginx("1m", 1 << 20, "1 MiB", n, seconds), 2 if n == 10 else 1)
    idle = Idle("idle", "50 silent streams to redis", 5)
    result.append(Figure("service_idle_cpu", "redis and 50 lifted streams, all silent: CPU, both ends", 0, "ms/s",
                         [(idle, plain), (idle, shm)], lambda m: max(0, m[1]["cpu_ms_per_s"] - m[0]["cpu_ms_per_s"])))
    memory = IdleMemory("idle_memory", "2,000 idle connections", os.path.join(options.build_dir, "bench"))
    unlifted = runner.Variant.shim(library, "shm", "shm, few calls")
    unlifted.lifts_to = None
    result.append(Figure("service_idle_memory", "an idle connection, beyond the kernel's, each end", 1, "KiB",
                         [(memory, plain), (memory, unlifted)],
                         lambda m: m[1]["kib_per_connection"] - m[0]["kib_per_connection"]))
    return result
