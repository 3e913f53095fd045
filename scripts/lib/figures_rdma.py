"""The figures of the RDMA path. They are measured on this machine's device, or in the lab (one guest)."""

import os
import shutil

import observe
import runner
import verbs
import workloads
from figures import Figure, ratio

CONNECTIONS = (10, 100, 500, 2000)


def make(options):
    bench = os.path.join(options.build_dir, "bench")
    library = os.path.abspath(os.path.join(options.build_dir, "librsock.so"))
    iperf_s, own_s = (1, 0.5) if options.quick else (3, 1.5)

    plain = runner.Variant.plain("tcp beside rdma")
    rdma = runner.Variant.shim(library, "rdma")
    # As ibv_rc_pingpong does: it never sleeps.
    polling = runner.Variant.shim(library, "rdma", "rdma polling", {"RSOCK_SPIN_US": "100000"})
    asleep = runner.Variant.shim(library, "rdma", "rdma asleep", {"RSOCK_SPIN_US": "0"})
    # Short connections pass no threshold; of many, most are cold.
    short = runner.Variant.shim(library, "rdma", "rdma, short")
    most = runner.Variant.shim(library, "rdma", "rdma, 64 at most", {"RSOCK_RDMA_STREAMS": "64"})
    short.lifts_to = most.lifts_to = None
    raw = runner.Variant("verbs", other=True)
    rsockets = runner.Variant("rsockets", other=True)

    warmup = workloads.RDMA_WARMUP
    iperf = workloads.Iperf3("128K", iperf_s, warmup)
    ping = workloads.round_trip(bench, 64, "64 B", own_s, warmup=warmup)
    blocks = workloads.one_way(bench, 131072, "128 KiB", own_s, warmup)
    pingpong = verbs.PingPong(64, "64 B", own_s)
    write_bw = verbs.WriteBandwidth(65536, "64 KiB", iperf_s)

    def counted(size, label):
        load = workloads.one_way(bench, size, label, 20, warmup)
        load.key, load.title = f"calls_{size}", f"system calls, one way {label}"
        load.observe, load.observed_figures = lambda ends: observe.system_calls(ends, warmup + 1), observe.per_message
        return load

    def many(count):
        return workloads.OwnPair(f"many_{count}", f"{count} connections, 64 hot", 8, bench, "many", ("messages_per_s",), (),
                                 ("--connections", str(count), "--settle", str(2 * warmup)), 0, observe.pinned,
                                 lambda _, observed: observed)

    small, large = counted(64, "64 B"), counted(131072, "128 KiB")
    crowds = [(many(count), most) for count in CONNECTIONS]

    def flat(name):
        """What 100 connections take (10 are fewer than 64) against what 2,000 take."""
        return lambda measured: measured[1][name] / measured[-1][name]

    result = [
        Figure("rdma_vs_write_bw", "iperf3 128 KiB blocks, against ib_write_bw 64 KiB", 0.95, "x",
               [(write_bw, raw), (iperf, rdma)], ratio("gbit_per_s")),
        Figure("rdma_vs_write_bw_polling", "the same, polling as ib_write_bw does", 0.95, "x",
               [(write_bw, raw), (iperf, polling)], ratio("gbit_per_s")),
        Figure("rdma_rtt_vs_pingpong", "round trip 64 B, polling, against ibv_rc_pingpong", 1 / 1.2, "x",
               [(pingpong, raw), (ping, polling)], ratio("mean_us", "lower")),
        Figure("rdma_rtt_vs_tcp", "round trip 64 B, polling, against TCP", 3, "x",
               [(ping, plain), (ping, polling)], ratio("p50_us", "lower")),
        Figure("rdma_rtt_asleep", "round trip 64 B, both ends asleep, against TCP", None, "x",
               [(ping, plain), (ping, asleep)], ratio("p50_us", "lower")),
        Figure("rdma_calls", "system calls per 64 B message, beyond the posts", 0.01, "calls",
               [(small, rdma)], lambda m: m[0]["calls_per_message"]),
        Figure("rdma_calls_mb", "system calls per MB of 128 KiB blocks, beyond the posts", None, "calls",
               [(large, rdma)], lambda m: m[0]["calls_per_mb"]),
        Figure("rdma_calls_polling", "system calls per 64 B message, beyond the posts, polling", 0.01, "calls",
               [(small, polling)], lambda m: m[0]["calls_per_message"]),
        Figure("rdma_calls_mb_polling", "system calls per MB of 128 KiB blocks, beyond the posts, polling", 1, "calls",
               [(large, polling)], lambda m: m[0]["calls_per_mb"]),
        Figure("rdma_pinned", "pinned memory, 100 connections against 2,000, 64 hot", 0.9, "x", crowds, flat("pinned_mb")),
        Figure("rdma_pinned_qps", "queue pairs, 100 connections against 2,000, 64 hot", 0.9, "x", crowds,
               flat("queue_pairs")),
        # Fewer than may be hot: each has its own, and what one takes is a tenth of this.
        Figure("rdma_pinned_10", "pinned memory, 10 connections", None, "MB", crowds[:1], lambda m: m[0]["pinned_mb"]),
        Figure("rdma_pinned_qps_10", "queue pairs, 10 connections", None, "queue pairs", crowds[:1],
               lambda m: m[0]["queue_pairs"]),
    ]
    for clients in (1, 8, 64):
        connect = workloads.connect_rate(bench, clients, own_s)
        result.append(Figure(f"rdma_connect_{clients}",
                             f"connect, request, close, against TCP; {clients} client{'s' * (clients > 1)}", 0.97, "x",
                             [(connect, plain), (connect, short)], ratio("connections_per_s"), rounds=3))
    if shutil.which("rstream"):
        result.insert(1, Figure("rdma_vs_rspreload", "one way 128 KiB, against rstream (librspreload fails on iperf3)", 1.2,
                                "x", [(verbs.Rstream(131072, "128 KiB", own_s), rsockets), (blocks, rdma)],
                                ratio("gbit_per_s")))
    for figure in result:
        figure.lab = True
    return result
