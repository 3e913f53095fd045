"""The same unmodified programs over TCP and over librsock, side by side. scripts/compare runs this."""

import argparse
import json
import os
import sys

import plot
import report
import runner
import workloads

SIZES = ((64, "64 B"), (4096, "4 KiB"), (65536, "64 KiB"))
BLOCKS = ("128K", "4K", "64")

# What the table calls a figure.
NAMES = {
    "gbit_per_s": "throughput, Gbit/s",
    "cpu_s_per_gb": "CPU, s per GB",
    "p50_us": "p50, us",
    "p99_us": "p99, us",
    "messages_per_s": "messages/s",
}


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs; under a minute")
    parser.add_argument("--paths", default="tcp,shm", help="of tcp,shm,rdma (default: tcp,shm)")
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


def rdma_devices():
    try:
        return os.listdir("/sys/class/infiniband")
    except OSError:
        return []


def make_variants(options):
    library = os.path.abspath(os.path.join(options.build_dir, "librsock.so"))
    variants = [runner.Variant.plain("tcp")]
    for path in options.path_list[1:]:
        if path == "rdma" and not rdma_devices():
            print("rdma: this machine has no RDMA device (/sys/class/infiniband is empty): "
                  "its column is left out")
            continue
        variants.append(runner.Variant.shim(library, path))
    return variants


def make_workloads(options):
    bench = os.path.join(options.build_dir, "bench")
    # iperf3 counts in whole seconds.
    iperf_s, own_s = (1, 0.3) if options.quick else (3, 1.5)
    loads = [workloads.Iperf3(block, iperf_s) for block in BLOCKS]
    loads += [workloads.round_trip(bench, size, label, own_s) for size, label in SIZES]
    loads += [workloads.one_way(bench, size, label, own_s) for size, label in SIZES]
    return loads


def measure(options, variants, loads):
    """{workload key: {variant name: Series}}; variants alternate within each round."""
    results = {load.key: {v.name: report.Series(v) for v in variants} for load in loads}
    progress = report.Progress("compare", options.rounds * len(loads) * len(variants))
    with runner.Runner(options.address) as run:
        for number in range(options.rounds):
            for load in loads:
                # Every other round begins with the other side: a machine that slows down or
                # warms up then favours neither.
                for variant in variants if number % 2 == 0 else reversed(variants):
                    progress.step(f"round {number + 1}/{options.rounds}, {load.title}, {variant.name}")
                    results[load.key][variant.name].measure(run, load)
    progress.end()
    return results


def figures_of(load):
    names = ("gbit_per_s", "cpu_s_per_gb") if isinstance(load, workloads.Iperf3) else load.keep
    return [name for name in names if name in NAMES]


def make_table(variants, loads, results):
    shims = variants[1:]
    header = ["", *[v.name for v in variants], *[f"{v.name} gain" for v in shims]]
    rows = [header, [("-" * len(cell)) for cell in header]]
    for load in loads:
        series = results[load.key]
        rows.append(load.title)
        for name in figures_of(load):
            values = [series[v.name].median(name) for v in variants]
            gains = [workloads.gain(name, values[0], value) for value in values[1:]]
            rows.append(["  " + NAMES[name], *map(report.number, values), *map(report.times, gains)])
        for variant in variants:
            one = series[variant.name]
            for error in one.errors:
                rows.append(f"  {variant.name} FAILED: {error}")
            if one.proof and (one.rounds or not one.errors):
                rows.append("  " + one.proof.text())
    return report.table(rows, right=range(1, len(header)))


def make_panels(variants, loads, results):
    def values(load, name):
        return {v.name: results[load.key][v.name].median(name) for v in variants}

    iperf = [load for load in loads if isinstance(load, workloads.Iperf3)]
    round_trips = [load for load in loads if load.key.startswith("rtt")]
    streams = [load for load in loads if load.key.startswith("stream")]

    def short(load):
        return load.title.split(" ", 2)[2]

    return [
        plot.Panel("iperf3 throughput (higher is better)", "Gbit/s", True,
                   [(load.title, values(load, "gbit_per_s")) for load in iperf]),
        plot.Panel("iperf3 CPU time, both sides (lower is better)", "s per GB", True,
                   [(load.title, values(load, "cpu_s_per_gb")) for load in iperf]),
        plot.Panel("round trip (lower is better)", "us", True,
                   [(f"{short(load)} {name[:3]}", values(load, name))
                    for load in round_trips for name in ("p50_us", "p99_us")]),
        plot.Panel("one-way messages (higher is better)", "messages per s", True,
                   [(short(load), values(load, "messages_per_s")) for load in streams]),
    ]


def write_json(path, options, variants, loads, results, good, others):
    content = {
        "tool": "rsock compare", "quick": options.quick, "rounds": options.rounds,
        "machine": report.machine(), "cores_used_by_others": round(others, 2),
        "paths": [v.name for v in variants], "good": good,
        "figures": {name: {"unit": unit, "better": better}
                    for name, (unit, better) in workloads.FIGURES.items()},
        "tuning": {k: v for k, v in os.environ.items() if k.startswith("RSOCK_")},
        "workloads": [],
    }
    for load in loads:
        series = results[load.key]
        gains = {v.name: {name: workloads.gain(name, series["tcp"].median(name),
                                               series[v.name].median(name))
                          for name in figures_of(load)} for v in variants[1:]}
        content["workloads"].append({
            "key": load.key, "title": load.title, "gain": gains,
            "variants": {v.name: series[v.name].as_json() for v in variants}})
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def main(argv):
    options = parse_arguments(argv)
    os.makedirs(options.out, exist_ok=True)
    variants = make_variants(options)
    loads = make_workloads(options)
    neighbours = report.Neighbours()
    results = measure(options, variants, loads)
    others, note = neighbours.cores(), neighbours.text()
    good = all(one.good for series in results.values() for one in series.values())

    print(f"medians of {report.rounds(options.rounds)}; a gain above 1 means that the shim is better\n")
    print(make_table(variants, loads, results))
    if note:
        print("\n" + note)
    json_path = options.json or os.path.join(options.out, "compare.json")
    write_json(json_path, options, variants, loads, results, good, others)
    host = report.machine()
    fault = plot.draw(f"librsock and TCP: {host['cpu']}, {host['cores']} cores, Linux "
                      f"{host['kernel']}; medians of {report.rounds(options.rounds)}",
                      make_panels(variants, loads, results), [v.name for v in variants],
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
