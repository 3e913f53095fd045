"""Measures the figures that the project holds itself to, and prints each beside its target.

It reports; a figure that is not met is not an error. Status 1 only if something could not be
measured. Figures of RDMA are measured on this machine's device, or in the lab, in one boot.
scripts/bench runs this.
"""

import argparse
import json
import os
import statistics
import sys

import figures
import figures_rdma
import figures_services
import lab
import lab_runner
import report
import runner


def parse_arguments(argv):
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs, few rounds")
    parser.add_argument("--rounds", type=int, help="rounds to take medians of (default: 5; quick: 3)")
    parser.add_argument("--only", metavar="TEXT", help="only figures whose key contains TEXT")
    parser.add_argument("--ring", default="4M", help="size of the bare ring, each way (4M, as a stream has)")
    parser.add_argument("--out", metavar="DIR", help="where bench.json goes (build/bench-report)")
    parser.add_argument("--json", metavar="FILE", help="write the JSON there instead")
    parser.add_argument("--build-dir", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds takes a number from 1")
    options.rounds = options.rounds or (3 if options.quick else 5)
    options.out = options.out or os.path.join(options.build_dir, "bench-report")
    return options


def plan(wanted, rounds):
    """What runs in how many rounds: a measurement that several figures share runs once a round."""
    needs = {}
    for figure in wanted:
        for load, variant in figure.needs:
            key = (load.key, variant.name)
            old = needs.get(key)
            count = max(rounds * figure.rounds, old[2] if old else 0)
            needs[key] = (load, variant, count)
    # The same workload's variants stand side by side, so that they run at nearly the same moment.
    order = list(dict.fromkeys(key[0] for key in needs))
    return sorted(needs.values(), key=lambda need: order.index(need[0].key))


def measure(wanted, rounds, run):
    """{(workload's key, variant's name): Series}"""
    needs = plan(wanted, rounds)
    results = {(load.key, v.name): report.Series(v) for load, v, _ in needs}
    progress = report.Progress("bench", sum(count for _, _, count in needs))
    most = max(count for _, _, count in needs)
    for number in range(most):
        # Every other round goes backwards: a drift of the machine favours neither side.
        for load, variant, count in needs if number % 2 == 0 else reversed(needs):
            if number < count:
                progress.step(f"round {number + 1}/{most}, {load.title}, {variant.name}")
                results[load.key, variant.name].measure(run, load)
    progress.end()
    return results


def measure_all(wanted, options):
    """(figures that could be measured, results). Here first; then where there is RDMA, if that can be had."""
    here, there = ([f for f in wanted if f.lab is in_lab] for in_lab in (False, True))
    results = {}
    if here:
        with runner.Runner() as run:
            results |= measure(here, options.rounds, run)
    if there:
        try:
            with lab.Lab(1, options.build_dir) as hosts:
                results |= measure(there, options.rounds, lab_runner.LabRunner(hosts))
        except lab.Unavailable as reason:
            print(f"bench: figures of RDMA are left out: no device, and no lab here: {reason}", file=sys.stderr)
            there = []
    return here + there, results


class Verdict:
    def __init__(self, figure, results):
        self.figure = figure
        series = [results[load.key, variant.name] for load, variant in figure.needs]
        self.faults = []
        for one in series:
            self.faults += [f"{one.variant.name}: {error}" for error in one.errors]
            if one.proof and one.rounds and not one.proof.ok:
                self.faults.append(f"{one.variant.name}: {one.proof.text()}")
        self.value = self.low = self.high = None
        # Of what ran in the same round, nearly at the same moment: a machine that is slower for a
        # while then slows both sides of a ratio.
        each = [figure.value(list(group)) for group in zip(*(one.rounds for one in series))]
        self._summarise([value for value in each if value is not None])
        # A figure of a shim that did not lift is not the shim's figure.
        self.met = None if self.faults else figure.met(self.value)

    def _summarise(self, each):
        if each:
            self.value = statistics.median(each)
        if len(each) >= 3:
            self.low, _, self.high = statistics.quantiles(each, n=4, method="inclusive")

    def cells(self):
        figure = self.figure
        mark = {True: "yes", False: "NO", None: "-"}[self.met]
        if self.faults and figure.target is not None:
            mark = "NO (not measured)"
        spread = "" if self.low is None else f"{_show(self.low, figure.unit)} .. " + \
            _show(self.high, figure.unit)
        target = "(none)" if figure.target is None else \
            (">= " if figure.unit == "x" else "<= ") + _show(figure.target, figure.unit)
        return [figure.title, target, _show(self.value, figure.unit), spread, mark]

    def as_json(self):
        return {"key": self.figure.key, "title": self.figure.title, "target": self.figure.target,
                "unit": self.figure.unit, "value": self.value, "quartiles": [self.low, self.high],
                "met": self.met, "faults": self.faults}


def _show(value, unit):
    if value is None:
        return "-"
    # A fall below the target by a thousandth must not be rounded away.
    return f"{value:.1f}x" if unit == "x" and value >= 10 else \
        f"{value:.3f}x" if unit == "x" else f"{value:.1f} {unit}" if unit in ("ns", "us") else \
        f"{value:.3f} {unit}"


def main(argv):
    options = parse_arguments(argv)
    wanted = [figure for figure in figures.make(options) + figures_services.make(options) +
              figures_rdma.make(options) if (options.only or "") in figure.key]
    if not wanted:
        print(f"bench: no figure's key contains '{options.only}'", file=sys.stderr)
        return 2
    neighbours = report.Neighbours()
    try:
        wanted, results = measure_all(wanted, options)
    except (lab.HostDown, lab.LabTimeout) as fault:
        print(f"bench: {fault}", file=sys.stderr)
        return 1
    if not wanted:
        return 77
    others, note = neighbours.cores(), neighbours.text()
    verdicts = [Verdict(figure, results) for figure in wanted]

    header = ["figure", "target", "measured", "half of the rounds within", "met"]
    rows = [header, ["-" * len(cell) for cell in header]]
    for verdict in verdicts:
        rows.append(verdict.cells())
        rows += [f"    {fault}" for fault in verdict.faults]
    print(f"medians of {report.rounds(options.rounds)} (more where the difference is small); a "
          "ratio is the median of the rounds' ratios\n")
    print(report.table(rows, right=(1, 2)))
    if note:
        print("\n" + note)
    print("\nmeasured, medians:")
    raw = [["", ""]]
    for (key, variant), one in results.items():
        if one.rounds:
            values = ", ".join(f"{name} {report.number(one.median(name))}" for name in one.rounds[0])
            raw.append([f"  {key}, {variant}", values])
            if one.proof and one.proof.ok:
                raw.append(["", one.proof.text()])
    print(report.table(raw[1:] or raw))

    os.makedirs(options.out, exist_ok=True)
    path = options.json or os.path.join(options.out, "bench.json")
    content = {"tool": "rsock bench", "quick": options.quick, "rounds": options.rounds,
               "machine": report.machine(), "cores_used_by_others": round(others, 2),
               "ring": options.ring,
               "figures": [verdict.as_json() for verdict in verdicts],
               "series": {f"{key}, {variant}": one.as_json()
                          for (key, variant), one in results.items()}}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
    print(f"\nwritten: {path}")
    return 1 if any(verdict.faults for verdict in verdicts) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\nbench: interrupted; every process it started is ended", file=sys.stderr)
        sys.exit(130)
