"""The same unmodified programs over TCP and over librsock, side by side. scripts/compare runs this.

With rdma among the paths everything runs on this machine's RDMA device, or, where it has none, in the lab (scripts/lab);
librspreload of rdma-core and raw verbs then stand beside it.
"""

import argparse
import contextlib
import json
import os
import sys

import lab
import lab_runner
import plot
import report
import runner
import verbs
import workloads

SIZES = ((64, "64 B"), (4096, "4 KiB"), (65536, "64 KiB"))
BLOCKS = ("128K", "4K", "64")

# What the table calls a figure.
NAMES = {
    "gbit_per_s": "throughput, Gbit/s",
    "cpu_s_per_gb": "CPU, s per GB",
    "mean_us": "mean, us",
    "p50_us": "p50, us",
    "p99_us": "p99, us",
    "messages_per_s": "messages/s",
}


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs; under a minute")
    parser.add_argument("--paths", default="tcp,shm", help="of tcp,shm,rdma (default: tcp,shm)")
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1,
                        help="with rdma in the lab: one guest of two processors (the default; judge latency there), or "
                             "two of one processor with a cable between them")
    parser.add_argument("--rounds", type=int, help="rounds to take medians of (default: 5; quick: 3)")
    parser.add_argument("--address", default="127.0.0.1", help="where servers listen (127.0.0.1)")
    parser.add_argument("--out", metavar="DIR", help="for compare.json, .svg, .png (build/compare)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON there instead")
    parser.add_argument("--build-dir", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    paths = list(dict.fromkeys(p for p in options.paths.split(",") if p))
    unknown = [p for p in paths if p not in ("tcp", "shm", "rdma")]
    if unknown or not paths:
        parser.error(f"--paths takes tcp, shm and rdma, not '{','.join(unknown) or options.paths}'")
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds takes a number from 1")
    # TCP is what everything is compared with, so it always runs, and first.
    options.path_list = ["tcp"] + [p for p in paths if p != "tcp"]
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.out = options.out or os.path.join(options.build_dir, "compare")
    return options


class Plan:
    """What runs: variants, the first of which is TCP, and loads; and what stands in for a load in raw verbs."""

    def __init__(self, options, rdma):
        library = os.path.abspath(os.path.join(options.build_dir, "librsock.so"))
        bench = os.path.join(options.build_dir, "bench")
        # iperf3 counts in whole seconds.
        iperf_s, own_s = (1, 0.3) if options.quick else (3, 1.5)
        downloads = 3 if options.quick else 8
        # A first lift over RDMA loads rdma-core and opens the device.
        warmup = workloads.RDMA_WARMUP if rdma else 0
        self.rdma = rdma
        self.loads = [workloads.Iperf3(block, iperf_s, warmup) for block in BLOCKS]
        self.loads.append(workloads.Iperf3(BLOCKS[0], iperf_s, warmup, ("-Z",)))
        if rdma:
            self.loads.append(workloads.one_way(bench, 131072, "128 KiB", own_s, warmup))
        else:
            # Not with rdma: they would be over before a first lift there is done, and the lab's guests have no disk.
            self.loads += [workloads.Iperf3(BLOCKS[0], iperf_s, flags=("-F",)), workloads.Download(downloads)]
        self.loads += [workloads.round_trip(bench, size, label, own_s, warmup=warmup) for size, label in SIZES]
        self.loads += [workloads.one_way(bench, size, label, own_s, warmup) for size, label in SIZES]
        paths = [path for path in options.path_list[1:] if rdma or path != "rdma"]
        self.variants = [runner.Variant.plain("tcp")] + [runner.Variant.shim(library, path) for path in paths]
        self.raw = {}
        if rdma:
            self.variants += filter(None, [runner.Variant.rspreload(), runner.Variant("verbs", other=True)])
            self.raw = {f"rtt_{size}": verbs.PingPong(size, label, own_s) for size, label in SIZES}
            self.raw[f"iperf3_{BLOCKS[0]}"] = verbs.WriteBandwidth(65536, "64 KiB", iperf_s)

    def runs(self):
        """(load, [(variant, what runs)])"""
        for load in self.loads:
            row = [(v, load) for v in self.variants if v.name != "verbs"]
            row += [(v, self.raw[load.key]) for v in self.variants if v.name == "verbs" and load.key in self.raw]
            yield load, row


@contextlib.contextmanager
def open_runner(options):
    """(runner, lab or None). Without a lab the machine's own processes are run."""
    if "rdma" not in options.path_list:
        with runner.Runner(options.address) as run:
            yield run, None
        return
    with lab.Lab(options.hosts, options.build_dir) as hosts:
        where = f"this machine's {hosts.hosts[0].rdma_device}" if hosts.here else \
            f"the lab, {options.hosts} emulated guest{'s' * (options.hosts > 1)}: compare within this table only"
        print(f"rdma: on {where}")
        yield lab_runner.LabRunner(hosts), hosts


def measure(options, plan, run):
    """{workload key: {variant name: Series}}; variants alternate within each round."""
    rows = list(plan.runs())
    results = {load.key: {v.name: report.Series(v) for v, _ in row} for load, row in rows}
    progress = report.Progress("compare", options.rounds * sum(len(row) for _, row in rows))
    for number in range(options.rounds):
        for load, row in rows:
            # Every other round begins with the other side: a machine that slows down or
            # warms up then favours neither.
            for variant, what in row if number % 2 == 0 else reversed(row):
                progress.step(f"round {number + 1}/{options.rounds}, {what.title}, {variant.name}")
                results[load.key][variant.name].measure(run, what)
    progress.end()
    return results


def figures_of(load, rdma):
    if isinstance(load, (workloads.Iperf3, workloads.Download)):
        return ["gbit_per_s", "cpu_s_per_gb"]
    if load.key.startswith("rtt"):
        # Raw verbs tell a mean only.
        return ["mean_us"] * rdma + ["p50_us", "p99_us"]
    return ["messages_per_s"] + ["gbit_per_s"] * (load.key == "stream_131072")


def median(series, variant, name):
    return series[variant.name].median(name) if variant.name in series else None


def cell(series, variant, name):
    one = series.get(variant.name)
    return "failed" if one and one.errors and not one.rounds else report.number(median(series, variant, name))


def make_table(plan, results):
    variants = plan.variants
    others = [v for v in variants[1:] if v.name != "verbs"]
    header = ["", *[v.name for v in variants], *[f"{v.name} gain" for v in others]] + ["rdma/verbs"] * plan.rdma
    rows = [header, [("-" * len(cell)) for cell in header]]
    for load in plan.loads:
        series = results[load.key]
        raw = plan.raw.get(load.key)
        rows.append(load.title + (f" (verbs: {raw.title})" if raw else ""))
        for name in figures_of(load, plan.rdma):
            tcp = median(series, variants[0], name)
            ratios = [workloads.gain(name, tcp, median(series, v, name)) for v in others]
            if plan.rdma:
                ends = [one.median(name) if (one := series.get(v)) else None for v in ("verbs", "rdma")]
                ratios.append(workloads.gain(name, *ends))
            rows.append(["  " + NAMES[name], *(cell(series, v, name) for v in variants), *map(report.times, ratios)])
        for variant in variants:
            one = series.get(variant.name)
            for error in one.errors if one else ():
                rows.append(f"  {variant.name} FAILED: {error}")
            if one and one.proof and (one.rounds or not one.errors):
                rows.append("  " + one.proof.text())
    return report.table(rows, right=range(1, len(header)))


def make_panels(plan, results):
    loads = plan.loads

    def values(load, name):
        return {v.name: median(results[load.key], v, name) for v in plan.variants}

    # Under titles that say iperf3.
    bulk = [(load.title.removeprefix("iperf3 "), load) for load in loads if isinstance(load, workloads.Iperf3)]
    bulk += [("nginx, curl", load) for load in loads if isinstance(load, workloads.Download)]
    round_trips = [load for load in loads if load.key.startswith("rtt")]
    streams = [load for load in loads if load.key.startswith("stream")]

    def short(load):
        return load.title.split(" ", 2)[2]

    def part(name):
        return name.split("_")[0]

    return [
        plot.Panel("iperf3 and nginx: throughput (higher is better)", "Gbit/s", True,
                   [(label, values(load, "gbit_per_s")) for label, load in bulk]),
        plot.Panel("iperf3 and nginx: CPU time, both sides (lower is better)", "s per GB", True,
                   [(label, values(load, "cpu_s_per_gb")) for label, load in bulk]),
        plot.Panel("round trip (lower is better)", "us", True,
                   [(f"{short(load)} {part(name)}", values(load, name))
                    for load in round_trips for name in (("mean_us",) if plan.rdma else ("p50_us", "p99_us"))]),
        plot.Panel("one-way messages (higher is better)", "messages per s", True,
                   [(short(load), values(load, "messages_per_s")) for load in streams]),
    ]


def write_json(path, options, plan, results, good, others, where):
    variants = plan.variants
    content = {
        "tool": "rsock compare", "quick": options.quick, "rounds": options.rounds,
        "machine": report.machine(), "where": where, "cores_used_by_others": round(others, 2),
        "paths": [v.name for v in variants], "good": good,
        "figures": {name: {"unit": unit, "better": better}
                    for name, (unit, better) in workloads.FIGURES.items()},
        "tuning": {k: v for k, v in os.environ.items() if k.startswith("RSOCK_")},
        "workloads": [],
    }
    for load in plan.loads:
        series = results[load.key]
        gains = {name: {figure: workloads.gain(figure, series["tcp"].median(figure), one.median(figure))
                        for figure in figures_of(load, plan.rdma)}
                 for name, one in series.items() if name != "tcp"}
        content["workloads"].append({
            "key": load.key, "title": load.title, "gain": gains,
            "verbs": plan.raw[load.key].title if load.key in plan.raw else None,
            "variants": {name: one.as_json() for name, one in series.items()}})
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def main(argv):
    options = parse_arguments(argv)
    os.makedirs(options.out, exist_ok=True)
    neighbours = report.Neighbours()
    try:
        with open_runner(options) as (run, hosts):
            plan = Plan(options, hosts is not None)
            where = "this machine" if not hosts or hosts.here else f"lab, {options.hosts} guest{'s' * (options.hosts > 1)}"
            results = measure(options, plan, run)
    except lab.Unavailable as reason:
        print(f"compare: no RDMA device, and no lab here: {reason}", file=sys.stderr)
        return 77
    except (lab.HostDown, lab.LabTimeout) as fault:
        print(f"compare: {fault}", file=sys.stderr)
        return 1
    others, note = neighbours.cores(), neighbours.text()
    good = all(one.good for series in results.values() for one in series.values() if not one.variant.other)

    print(f"medians of {report.rounds(options.rounds)}; a gain above 1 means better than TCP\n")
    print(make_table(plan, results))
    if note:
        print("\n" + note)
    json_path = options.json or os.path.join(options.out, "compare.json")
    write_json(json_path, options, plan, results, good, others, where)
    host = report.machine()
    fault = plot.draw(f"librsock and TCP: {where}, {host['cpu']}, {host['cores']} cores, Linux "
                      f"{host['kernel']}; medians of {report.rounds(options.rounds)}",
                      make_panels(plan, results), [v.name for v in plan.variants],
                      os.path.join(options.out, "compare"))
    print(f"\nwritten: {json_path}" + ("" if fault else f", {options.out}/compare.svg and .png"))
    if fault:
        print(f"no picture: {fault}", file=sys.stderr)
    if not good:
        print("compare: some runs failed or were NOT LIFTED (see the table); those figures are not "
              "the shim's", file=sys.stderr)
    return 0 if good and not fault else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\ncompare: interrupted; every process it started is ended", file=sys.stderr)
        sys.exit(130)
