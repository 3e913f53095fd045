"""The things that are measured: each runs once, in one variant, and returns figures and a Proof.

A figure is a plain number under a fixed name. Names, units and which way is better are in FIGURES.
"""

import os
import time

import runner
import servers
import summary

# name: (unit, better)
FIGURES = {
    "gbit_per_s": ("Gbit/s", "higher"),
    "cpu_s_per_gb": ("CPU s/GB", "lower"),
    "p50_us": ("us", "lower"),
    "p99_us": ("us", "lower"),
    "mean_us": ("us", "lower"),
    "messages_per_s": ("1/s", "higher"),
    "connections_per_s": ("1/s", "higher"),
}

FILE_BYTES = 256 << 20  # of what is sent from a file

RDMA_WARMUP = 4  # seconds: emulated, a process's first lift takes one to three


def gain(name, base, other):
    """How many times better `other` is than `base`; above 1 is better, whatever the figure."""
    if not base or not other:
        return None
    return base / other if FIGURES[name][1] == "lower" else other / base


class Workload:
    """`run` does one measurement; `seconds` is how long it measures, after `warmup` seconds that don't count (0: the
    program's own, short one).
    """

    def __init__(self, key, title, seconds, warmup=0):
        self.key = key
        self.title = title
        self.seconds = seconds
        self.warmup = warmup

    def run(self, run, variant):
        result = self._run(run, variant)
        figures = self._figures(result)
        proof = None
        if variant.lifts_to:
            measured = self._measured(result) if self.warmup else None
            proof = summary.prove(result.summary_text, result.pids, variant.lifts_to, measured)
        return figures, proof


class Iperf3(Workload):
    """One stream, client to server. The receiver's rate; the CPU time of both processes.

    flags: "-Z" sends by sendfile(2); "-F" sends what it reads from a file, and is over where that ends.
    """

    def __init__(self, block, seconds, warmup=0, flags=()):
        super().__init__("_".join([f"iperf3_{block}", *(flag.strip("-") for flag in flags)]),
                         " ".join([f"iperf3 -l {block}", *flags]), seconds, warmup)
        self.block = block
        self.flags = flags

    def _run(self, run, variant):
        port = run.free_port()
        server = ["iperf3", "-s", "-1", "-p", str(port), "-B", run.address]
        client = ["iperf3", "-c", run.address, "-p", str(port), "-l", self.block,
                  "-t", str(max(1, round(self.seconds))), "-J"]
        client += ["-O", str(self.warmup)] if self.warmup else []
        for flag in self.flags:
            client += [flag, run.file(FILE_BYTES)] if flag == "-F" else [flag]
        return run.pair(variant, lambda _: (server, port), lambda _: client, self.warmup + self.seconds)

    def _measured(self, result):
        return result.client_json()["end"]["sum_received"]["bytes"]

    def _figures(self, result):
        report = result.client_json()
        if "error" in report:
            raise runner.RunError("iperf3: " + str(report["error"]))
        try:
            end = report["end"]
            received = end["sum_received"]
            cpu = end["cpu_utilization_percent"]
            # Shares of the time since each began to wait for the other, which says little where a file is sent in not much
            # more than that. Then it is all of the processes' own time, some 10 ms of starting included.
            cpu_seconds = result.cpu_seconds if "-F" in self.flags else \
                (cpu["host_total"] + cpu["remote_total"]) / 100 * received["seconds"]
            rate = received["bits_per_second"] / 1e9
            gigabytes = received["bytes"] / 1e9
        except (KeyError, TypeError):
            raise runner.RunError("iperf3's report is incomplete") from None
        if gigabytes <= 0:
            raise runner.RunError("iperf3 moved no bytes")
        return {"gbit_per_s": rate, "cpu_s_per_gb": cpu_seconds / gigabytes}


class Download(Workload):
    """A file from nginx, which sends it by sendfile(2), to /dev/null by curl, several times, each by a curl and a connection
    of its own. The rate is curl's, from before it connects; the CPU time that of nginx and of all of every curl.
    """

    def __init__(self, count, size=FILE_BYTES):
        super().__init__("download_256m", "download 256 MiB, nginx, curl", 0)
        self.count = count
        self.size = size

    def run(self, run, variant):
        told, pids = [], {}
        with servers.start_nginx(run, variant, self.size) as (server, port, environment, summaries):
            url = f"http://{servers.in_url(run.address)}:{port}/{self.size}"
            argv = ["curl", "-q", "--noproxy", "*", "-sSf", "-o", "/dev/null", "-w", "%{size_download} %{time_total}", url]
            before = servers.cpu_seconds(server.pid) + runner.ended_seconds()
            for number in range(self.count):
                client = run.start(argv, environment, "client")
                told.append(run.finish(client, 60, "client"))
                pids[f"curl {number + 1}"] = client.pid
            time.sleep(0.2)  # what the server does behind the last one is its too
            used = servers.cpu_seconds(server.pid) + runner.ended_seconds() - before
        figures = self._rates(told, used)
        return figures, self._proof(runner.read(summaries), server.pid, pids, variant) if variant.lifts_to else None

    def _rates(self, told, used):
        try:
            size, seconds = (sum(map(float, column)) for column in zip(*(text.split() for text in told)))
        except ValueError:
            raise runner.RunError("curl told " + runner.tail(" ".join(told))) from None
        if size != self.size * self.count or seconds <= 0:
            raise runner.RunError(f"curl got {size:.0f} bytes of {self.size * self.count} in {seconds} s")
        return {"gbit_per_s": size * 8 / seconds / 1e9, "cpu_s_per_gb": used / (size / 1e9)}

    @staticmethod
    def _proof(text, master, pids, variant):
        """Every curl must have lifted, and nginx: its one worker, or, where that told nothing, its master, which did not."""
        workers = [pid for pid, entry in summary.parse(text).items() if pid not in pids.values() and entry.get("streams")]
        return summary.prove(text, {"nginx": max(workers, default=master), **pids}, variant.lifts_to)


class OwnPair(Workload):
    """One of our measuring programs, which serve and call.

    observe, for a LabRunner (see there): looks at both while they run; observed_figures(report, observed) are
    the figures of that.
    """

    def __init__(self, key, title, seconds, bench_dir, program, keep,
                 server_args=(), client_args=(), warmup=0, observe=None, observed_figures=None):
        super().__init__(key, title, seconds, warmup)
        self.observe = observe
        self.observed_figures = observed_figures
        self.binary = os.path.join(bench_dir, program)
        self.keep = keep
        self.server_args = list(server_args)
        self.client_args = list(client_args)

    def _run(self, run, variant):
        def server(port_file):
            argv = [self.binary, "server", "--port", "0", "--port-file", port_file,
                    "--bind", run.address]
            return argv + self.server_args, None

        def client(port):
            argv = [self.binary, "client", "--port", str(port), "--host", run.address,
                    "--seconds", str(self.seconds)]
            return argv + self.client_args

        more = {"observe": self.observe} if self.observe else {}
        return run.pair(variant, server, client, self.warmup + self.seconds + 1, **more)

    def _measured(self, result):
        report = result.client_json()
        return int(report["messages_per_s"] * report["seconds"] * report["size"])

    def _figures(self, result):
        report = result.client_json()
        missing = [name for name in self.keep if not report.get(name)]
        if missing:
            raise runner.RunError("the client gave no " + ", ".join(missing))
        figures = {name: report[name] for name in self.keep}
        if "bytes_per_s" in report:
            figures["gbit_per_s"] = report["bytes_per_s"] * 8 / 1e9
        if self.observed_figures:
            figures |= self.observed_figures(report, result.observed)
        return figures


def _warming(seconds):
    return ("--warmup", str(seconds)) if seconds else ()


def round_trip(bench_dir, size, label, seconds, mode="block", warmup=0):
    return OwnPair(f"rtt_{size}", f"round trip {label}", seconds, bench_dir, "rtt",
                   ("p50_us", "p99_us", "mean_us"), ("--mode", mode),
                   ("--size", str(size), "--mode", mode, *_warming(warmup)), warmup)


def one_way(bench_dir, size, label, seconds, warmup=0):
    return OwnPair(f"stream_{size}", f"one way {label}", seconds, bench_dir, "stream",
                   ("messages_per_s",), _warming(warmup), ("--size", str(size), *_warming(warmup)), warmup)


def connect_rate(bench_dir, clients, seconds):
    return OwnPair(f"connect_{clients}", f"connect, request, close; {clients} clients", seconds,
                   bench_dir, "connect_rate", ("connections_per_s",),
                   ("--threads", str(clients)), ("--threads", str(clients)))
