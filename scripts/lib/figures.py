"""The figures that the project holds itself to: what each compares, and its target.

Every figure is a ratio or a difference of two things that ran in turn in one run of scripts/bench:
the median, over the rounds, of what each round gave.
"""

import os

import runner
import workloads


class Single(workloads.Workload):
    """One program of ours that needs no partner: the bare ring, the cost of a call, of a start."""

    def __init__(self, key, title, seconds, argv, keep, preloaded_says=None):
        super().__init__(key, title, seconds)
        self.argv = argv
        self.keep = keep
        self.preloaded_says = preloaded_says  # must be true in the report of a preloaded run

    def run(self, run, variant):
        report = run.single(variant, self.argv, self.seconds)
        missing = [name for name in self.keep if name not in report]
        if missing:
            raise runner.RunError(f"{self.title} gave no {', '.join(missing)}")
        if self.preloaded_says and "LD_PRELOAD" in variant.env and not report[self.preloaded_says]:
            raise runner.RunError(f"{self.title}: the library is not in place "
                                  f"({self.preloaded_says} is false)")
        return {name: report[name] for name in self.keep}, None


class Figure:
    """One line of the report: value(measured) gives its number for one round."""

    def __init__(self, key, title, target, unit, needs, value, rounds=None):
        self.key = key
        self.title = title
        self.target = target  # None: for information
        self.unit = unit      # "x": at least the target; anything else: at most
        self.needs = needs    # [(Workload, Variant)], in the order in which a round runs them
        self.value = value    # of one round's figures, as a list in the order of `needs`
        self.rounds = rounds or 1  # how many times the usual number
        self.lab = False      # needs an RDMA device, so it runs where there is one

    def met(self, value):
        if self.target is None or value is None:
            return None
        return value >= self.target if self.unit == "x" else value <= self.target


def ratio(name, better="higher"):
    """The last of the needs against the first, above 1 if the last is better."""
    def value(measured):
        base, other = measured[0][name], measured[-1][name]
        if not base or not other:
            return None
        return base / other if better == "lower" else other / base
    return value


def make(options):
    """The list, in the order of the report."""
    bench = os.path.join(options.build_dir, "bench")
    library = os.path.abspath(os.path.join(options.build_dir, "librsock.so"))
    iperf_s, own_s = (1, 0.5) if options.quick else (3, 1.5)

    plain = runner.Variant.plain("plain")
    shm = runner.Variant.shim(library, "shm")
    # No spinning on either side: every wait ends in the kernel.
    asleep = runner.Variant.shim(library, "shm", "shm asleep", {"RSOCK_SPIN_US": "0"})
    on_tcp = runner.Variant.shim(library, "tcp", "shim on tcp")
    auto = runner.Variant.shim(library, "auto", "shim")
    # Nothing has to lift here: the pipe never can, short connections should not.
    auto.lifts_to = None

    def ring(test, key, keep):
        argv = [os.path.join(bench, "bare_ring"), test, "--ring", options.ring,
                "--seconds", str(own_s)]
        return Single(key, f"bare ring, {test}", own_s + 1, argv, keep)

    iperf = workloads.Iperf3("128K", iperf_s)
    by_sendfile = workloads.Iperf3("128K", iperf_s, flags=("-Z",))
    download = workloads.Download(3 if options.quick else 8)
    ping = workloads.round_trip(bench, 64, "64 B", own_s)
    one_way = workloads.one_way(bench, 64, "64 B", own_s)
    copy = ring("copy", "ring_copy", ("gbit_per_s",))
    spin = ring("spin", "ring_spin", ("p50_us", "mean_us"))
    futex = ring("futex", "ring_futex", ("p50_us", "mean_us"))
    pipe = Single("pipe", "pipe, 1 byte", 1, [
        os.path.join(bench, "syscall_cost"), "--batches", "2000" if options.quick else "6000"],
        ("added_ns", "ns_per_call_min", "ns_per_call_median"), preloaded_says="taken_over")
    start = Single("true", "start of true", 10, [
        os.path.join(bench, "startup_cost"), "--preload", library,
        "--runs", "100" if options.quick else "300"],
        ("added_us_median", "plain_us_median", "shim_us_median"))

    result = [
        Figure("iperf3_vs_tcp", "iperf3 128 KiB blocks, against TCP", 4, "x",
               [(iperf, plain), (iperf, shm)], ratio("gbit_per_s")),
        Figure("iperf3_zero_copy", "iperf3 -Z over shm, against iperf3 without it over shm", 1.15, "x",
               [(iperf, shm), (by_sendfile, shm)], ratio("gbit_per_s")),
        Figure("download_256m", "download of 256 MiB from nginx by curl, against TCP", 2.5, "x",
               [(download, plain), (download, shm)], ratio("gbit_per_s")),
        Figure("iperf3_vs_ring", "iperf3 128 KiB blocks, against a bare ring", 0.85, "x",
               [(copy, plain), (iperf, shm)], ratio("gbit_per_s")),
        Figure("rtt_spin_vs_tcp", "round trip 64 B, spinning, against TCP", 35, "x",
               [(ping, plain), (ping, shm)], ratio("p50_us", "lower")),
        Figure("rtt_sleep_vs_tcp", "round trip 64 B, both asleep, against TCP", 1.5, "x",
               [(ping, plain), (ping, asleep)], ratio("p50_us", "lower")),
        Figure("rtt_spin_vs_ring", "round trip 64 B, spinning, against a bare ring", None, "x",
               [(spin, plain), (ping, shm)], ratio("p50_us", "lower")),
        Figure("rtt_sleep_vs_ring", "round trip 64 B, asleep, against a bare futex", None, "x",
               [(futex, plain), (ping, asleep)], ratio("p50_us", "lower")),
        Figure("one_way_vs_tcp", "64 B one-way messages, against TCP", 15, "x",
               [(one_way, plain), (one_way, shm)], ratio("messages_per_s")),
        Figure("pipe_call", "a call on a pipe, added by the shim", 5, "ns",
               [(pipe, plain), (pipe, auto)],
               # It depends on where the loader happened to put the library: many short processes.
               lambda m: m[1]["added_ns"] - m[0]["added_ns"], rounds=3),
        Figure("start", "`true`, added by the shim", 1000, "us",
               [(start, plain)], lambda m: m[0]["added_us_median"]),
        Figure("iperf3_path_tcp", "iperf3 with RSOCK_PATH=tcp, against plain", 0.98, "x",
               [(iperf, plain), (iperf, on_tcp)], ratio("gbit_per_s"), rounds=4),
    ]
    for clients in (1, 8, 64):
        load = workloads.connect_rate(bench, clients, own_s)
        # Small differences: these get more rounds than the ones that differ many times over.
        result.append(Figure(f"connect_{clients}",
                             f"connect, request, close; {clients} client{'s' * (clients > 1)}",
                             0.97, "x", [(load, plain), (load, auto)],
                             ratio("connections_per_s"), rounds=3))
    return result
